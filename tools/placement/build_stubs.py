"""Compile stubs of the CUDA libraries, with which ONNX Runtime's CUDA provider loads without a GPU.

The required libraries, functions and symbol versions are read from the installed provider; functions that stubs.c does
not define return 0. Runs in .venv-gpu (pyelftools) and calls the C compiler `cc`, or $CC.
"""

import argparse
import os
import re
import shlex
import subprocess
from importlib.metadata import distribution
from pathlib import Path

from elftools.elf.elffile import ELFFile

HERE = Path(__file__).resolve().parent
PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
CUDA_LIBRARY = re.compile(r"lib(cu\w*)\.so\.\d+")
DRIVER = "libcuda.so.1"  # the only CUDA library whose symbols have no version


def needed_functions(provider: Path) -> dict[str, list[str]]:
    """Return CUDA library → names of the functions that the provider imports; empty if it only links the library."""
    with provider.open("rb") as file:
        elf = ELFFile(file)
        needed = [
            tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"
        ]
        library_of = {
            version["vna_other"]: record.name
            for record, versions in elf.get_section_by_name(".gnu.version_r").iter_versions()
            for version in versions
        }
        functions: dict[str, list[str]] = {name: [] for name in needed if CUDA_LIBRARY.fullmatch(name)}
        version_of = elf.get_section_by_name(".gnu.version")
        for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF" or symbol["st_info"]["bind"] == "STB_WEAK" or not symbol.name:
                continue
            library = library_of.get(
                version_of.get_symbol(index)["ndx"], DRIVER if symbol.name.startswith("cu") else ""
            )
            if library in functions:
                functions[library].append(symbol.name)
    return functions


def cudnn_functions(provider: Path) -> list[str]:
    """Return the cuDNN functions that the provider names; it looks them up in libcudnn.so.9 at run time."""
    names = re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", provider.read_bytes())
    return sorted({name.decode() for name in names})


def build(library: str, functions: list[str], folder: Path) -> None:
    """Compile one library: its functions in stubs.c, and `return 0` for every other one."""
    macro = library.split(".", maxsplit=1)[0].upper()
    written, rest, versions = folder / f"{macro}.o", folder / f"{macro}.c", folder / f"{macro}.map"
    _compile("-c", f"-D{macro}", HERE / "stubs.c", "-o", written)
    with written.open("rb") as file:
        present = {symbol.name for symbol in ELFFile(file).get_section_by_name(".symtab").iter_symbols()}
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in functions if name not in present))
    versions.write_text(f"{library} {{ global: *; }};\n")
    _compile(
        "-shared", f"-Wl,-soname,{library}", f"-Wl,--version-script,{versions}", written, rest, "-o", folder / library
    )


def _compile(*arguments: str | Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-O2", "-fPIC", "-Wall", "-Wextra", *arguments], check=True)


def main() -> None:
    """Build every library into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the libraries")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    provider = Path(str(distribution("onnxruntime-gpu").locate_file(PROVIDER)))
    libraries = needed_functions(provider) | {"libcudnn.so.9": cudnn_functions(provider)}
    for library, functions in libraries.items():
        build(library, functions, folder)
    print(f"{len(libraries)} stubs of CUDA libraries, {sum(map(len, libraries.values()))} functions, in {folder}")


if __name__ == "__main__":
    main()
