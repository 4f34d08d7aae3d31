"""The program `prelunet VERB`. A verb is imported only when it is called, so `--help` is instant.

Only this module prints errors and sets the exit code (docs/errors.md). Verbs of the layers above the
evaluator are found through the entry-point group `prelunet.verbs`, so nothing here imports them.
"""

import contextlib
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C: verbs that keep state finish their step, the others stop."""
    if sys.argv[1:2] == ["serve"]:
        os._exit(0)  # it still starts, so there is nothing to finish; later it handles signals itself
    raise KeyboardInterrupt


if sys.argv[1:2] == ["serve"]:  # the imports below take 0.1 s
    signal.signal(signal.SIGTERM, _on_sigterm)

import typer
import typer.core
from typer.main import get_command as build_command

from .errors import (
    EnvironmentFault,
    Interrupted,
    PreluNetError,
    UsageError,
    error_status,
    from_missing_module,
    from_os_error,
)
from .terminal import escape_unprintable


@dataclass(frozen=True)
class Verb:
    """A verb before it is imported.

    entry_point: whether it is found by its entry point; the others are functions in modules of their name in
    `evaluator.verbs`; configurable: whether its options can also be set in the environment and in a file; words: names
    of options that may be given without their names, in this order.
    """

    help: str
    entry_point: bool = False
    configurable: bool = False
    words: tuple[str, ...] = ()


VERBS: dict[str, Verb] = {  # in the order of README
    "evaluate": Verb(
        "Adopt a net if needed, evaluate it on a dataset and write the report.", entry_point=True, words=("net", "data")
    ),
    "compare": Verb("Compare two runs, class by class.", words=("data",)),
    "report": Verb("Write report.json, classes.csv and report.html of a run."),
    "runs": Verb("Show all runs below a folder in one table."),
    "adopt": Verb("Wrap another ONNX classifier into a model file.", entry_point=True),
    "classify": Verb("Classify images with a model file or through a server."),
    "serve": Verb("Serve models over gRPC and HTTP.", configurable=True, words=("model",)),
    "token": Verb("Create a token for a client of a server."),
    "doctor": Verb("Check this machine and its setup.", words=("model",)),
    "init": Verb("Write an initialized, untrained checkpoint.", entry_point=True),
    "import": Verb("Convert weights trained elsewhere to a checkpoint.", entry_point=True),
    "train": Verb("Train a net from a recipe; the same command resumes.", entry_point=True),
    "stats": Verb("Measure the mean and the color variation of a training set.", entry_point=True, words=("data",)),
    "inspect": Verb("Describe a checkpoint or a model file.", entry_point=True),
    "export": Verb("Export a checkpoint to an ONNX model file.", entry_point=True),
    "validate": Verb("Evaluate a model on a dataset; the same command resumes.", words=("model", "data")),
    "merge": Verb("Join the shards of a run into one run."),
    "ensemble": Verb("Average the scores of several models' runs."),
    "submission": Verb("Write a file for the ILSVRC server."),
    "verify": Verb("Check a model on this machine with its golden images."),
    "protocols": Verb("List the evaluation protocols and their costs.", words=("model",)),
    "bench": Verb("Measure where an evaluation spends its time.", words=("model", "data")),
}


class LazyVerbs(typer.core.TyperGroup):
    """A group that lists its verbs without importing them, and imports only the one that is called."""

    def __init__(self, **options: Any) -> None:
        """Know each verb by a placeholder with its help line, which is all that the list of verbs shows."""
        verbs = {name: typer.core.TyperCommand(name, help=verb.help) for name, verb in VERBS.items()}
        super().__init__(**{**options, "commands": verbs})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_verb(name or ""), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Map what the parser would swallow (Ctrl-C, a closed pipe) to our own exit codes."""
        try:
            from .imaging.decode import silence_decoders  # here: `--help` needs no Pillow

            silence_decoders()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.invoked_subcommand == "serve":  # stopped while it started; later it handles signals itself
                return 0
            raise Interrupted("interrupted; finished work is kept, and the same command resumes") from None
        except ModuleNotFoundError as error:
            raise from_missing_module(error) or error from error
        except BrokenPipeError:  # the reader of our output is gone, as in `prelunet inspect FILE | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def load_verb(name: str) -> Any:
    """Import a verb and turn its function into a command."""
    from .verbs.options import ConfigurableCommand, VerbCommand

    verb = VERBS[name]
    if verb.entry_point:
        from importlib.metadata import entry_points  # here: slow to import, and `--help` does not need it

        (entry,) = entry_points(group="prelunet.verbs", name=name)
        function = entry.load()
    else:
        function = getattr(importlib.import_module(f"prelunet.evaluator.verbs.{name}"), name)
    parser = ConfigurableCommand if verb.configurable else VerbCommand
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=parser, help=function.__doc__)(function)
    command = build_command(app)
    command.words = verb.words  # type: ignore[attr-defined]
    return command


_app = typer.Typer(
    cls=LazyVerbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version  # here, because it takes long to load

        sys.stdout.write(f"prelunet {version('prelunet')}\n")
        raise typer.Exit


@_app.callback(help="See where your image classifier fails, then serve it. Train PReLU-nets, too.")
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback


program = build_command(_app)


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit with a code of docs/errors.md."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines on stderr would only repeat our errors
    code = run(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # a second signal during Python's shutdown would change the code
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Print every error as one message on stderr."""
    try:
        result = program.main(arguments, prog_name="prelunet", standalone_mode=False)
    except PreluNetError as error:
        return _fail(error)
    except OSError as error:
        return _fail(from_os_error(error))
    except MemoryError:
        return _fail(EnvironmentFault("out of memory. Close other programs, or use a machine with more memory"))
    except UnicodeEncodeError as error:  # a path or argument that is not UTF-8, which no runtime and no server takes
        return _fail(UsageError(f"{error.object[:80]!a}: cannot be encoded as {error.encoding}. Use plain text"))
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # an error of the parser
            return _fail_parsing(error)
        raise
    return result if isinstance(result, int) else 0


def _fail_parsing(error: Any) -> int:
    text = error.format_message()
    if text.startswith("Usage:"):  # the help, because nothing was given
        sys.stderr.write(f"{text.rstrip()}\n")
        return int(error.exit_code)
    verb = getattr(getattr(error, "ctx", None), "command_path", "prelunet")
    return _fail(UsageError(f"{text.rstrip('.')}{'' if text.endswith('?') else '.'} See {verb} --help"))


def _fail(error: PreluNetError) -> int:
    if not str(error):  # another process of the same job reports it
        return error_status(error).exit_code
    with contextlib.suppress(OSError, AttributeError):  # stderr is closed or absent; the exit code remains
        sys.stderr.write(escape_unprintable(f"prelunet: {error}\n", newlines=True))
        sys.stderr.flush()
    return error_status(error).exit_code
