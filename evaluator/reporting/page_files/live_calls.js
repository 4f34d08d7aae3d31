// The call of the page as commands for a terminal.

const TOKEN_FILE = "PRELUNET_TOKEN_FILE"; // as for prelunet's own clients

const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const inPython = JSON.stringify; // its string literals are Python's, too

/** Return the commands by name. url: of the call; file: name of the picture; type: its media type. */
function callCommands(url, file, type, needsToken) {
  const curl = [
    `curl ${inShell(url)}`,
    `-H ${inShell(`Content-Type: ${type}`)}`,
    needsToken ? `-H "Authorization: Bearer $(cat "$${TOKEN_FILE}")"` : null,
    `--data-binary @${inShell(`./${file}`)}`, // a file called "-" would be the terminal's input
  ];
  const headers = [
    `"Content-Type": ${inPython(type)}`,
    needsToken ? `"Authorization": "Bearer " + Path(os.environ["${TOKEN_FILE}"]).read_text().strip()` : null,
  ];
  const python = `import json${needsToken ? "\nimport os" : ""}
from pathlib import Path
from urllib.request import Request, urlopen

image = Path(${inPython(file)}).read_bytes()
headers = {${headers.filter((header) => header).join(", ")}}
with urlopen(Request(${inPython(url)}, image, headers)) as answer:
    for found in json.load(answer)["predictions"]:
        print(f"{found['score']:.4f}  {found['name']}")
`;
  return { curl: `${curl.filter((part) => part).join(" \\\n  ")}\n`, python };
}
