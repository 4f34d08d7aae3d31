"""All errors that a user can see, and the tables that map them to exit codes, gRPC statuses and HTTP statuses.

    PreluNetError
    ├── UsageError            an invalid option, path or class list
    │   └── DivergenceError   training values that are no longer finite
    ├── ImageError            bytes that are not an image, or an image beyond the limits
    │   └── ImageTooLarge     an encoded image with too many bytes
    ├── DatasetError          a folder or archive that is not a labeled dataset
    ├── RunFolderError        a run folder of another model, dataset or protocol, or a damaged one
    ├── ModelNotFound         a model name that the server does not serve
    ├── ModelRefused          a version of a model that the server cannot load
    ├── Unauthenticated       a call without a token that the server knows
    ├── PermissionDenied      a call whose token lacks the scope for it
    ├── ContractError         an ONNX file that is not a model file, is damaged or too new
    ├── CheckpointError       the same for a checkpoint
    ├── Interrupted           stopped by a signal; the same command resumes
    ├── EnvironmentFault      a device, disk, port, server or extra that is unavailable
    │   ├── MissingExtra      a package that an extra installs is missing
    │   ├── OutOfMemory       a device with too little memory for a batch
    │   ├── DeviceLost        a device that returns only errors until the process restarts
    │   └── NotReady          a server that is still loading its models, or stopping
    ├── Overloaded            a server at its limits; try again later
    ├── DeadlinePassed        the caller's deadline has passed
    ├── CheckFailed           a requested check did not pass
    └── CannotTell            there are too few images for a requested check

Libraries raise errors. Only the command line prints them and exits; only the server sets a status.
"""

import errno
import importlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from .terminal import escape_unprintable

_LONG_WORD = re.compile(r"(?<!\S)\S{500,}")
_MAX_TEXT = 10_000  # characters


class PreluNetError(Exception):
    """Base class of all errors whose text is meant for the user: what is wrong, where, and how to fix it.

    Long words, and the middle of a long text, are left out: a name that an error quotes from a file may have megabytes.
    """

    def __init__(self, text: str = "") -> None:
        text = _LONG_WORD.sub(lambda word: f"{word[0][:100]}…{word[0][-100:]}", text)
        half = _MAX_TEXT // 2
        super().__init__(text if len(text) <= _MAX_TEXT else f"{text[:half]} … {text[-half:]}")

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows (IPython's protocol). Its %debug, and sys.last_value, keep the traceback."""
        return [f"{type(self).__name__}: {escape_unprintable(str(self), newlines=True)}"]


class UsageError(PreluNetError):
    """An option, a path or a class list is invalid."""


class DivergenceError(UsageError):
    """A training value is no longer finite; a lower learning rate may prevent it."""


class ImageError(PreluNetError):
    """The bytes are not an acceptable image; the caller must send another."""


class ImageTooLarge(ImageError):  # noqa: N818
    """The encoded image has too many bytes."""


class DatasetError(PreluNetError):
    """A folder or archive is not a labeled dataset, or does not fit the model's classes."""


class RunFolderError(PreluNetError):
    """A run folder belongs to another model, dataset or protocol, or is damaged."""


class ModelNotFound(PreluNetError):  # noqa: N818
    """The server serves no model of that name."""


class ModelRefused(PreluNetError):  # noqa: N818
    """The server cannot load a version of a model; what it serves stays."""


class Unauthenticated(PreluNetError):  # noqa: N818
    """The call has no token, or one that the server does not know."""


class PermissionDenied(PreluNetError):  # noqa: N818
    """The call's token lacks the scope that the method requires."""


class ContractError(PreluNetError):
    """An ONNX file violates the contract of docs/formats.md."""


class CheckpointError(PreluNetError):
    """A checkpoint is damaged, incomplete or of another format."""


class Interrupted(PreluNetError):  # noqa: N818 - not a fault: the work resumes
    """A signal stopped the work between two safe points; the same command resumes it."""


class EnvironmentFault(PreluNetError):  # noqa: N818
    """Something on the machine is unavailable: a device, disk space, a free port, a server, an extra."""


class MissingExtra(EnvironmentFault):
    """A package is missing that one of prelunet's extras installs."""


class OutOfMemory(EnvironmentFault):
    """A device has too little memory for a batch; a smaller one may fit."""


class DeviceLost(EnvironmentFault):
    """A device returns only errors until the process restarts."""


class NotReady(EnvironmentFault):
    """The server is still loading its models, or stopping.

    retry_after: seconds until a call may succeed, None if unknown.
    """

    def __init__(self, text: str = "", retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Overloaded(PreluNetError):  # noqa: N818
    """The server is at its limits; the same call may succeed later.

    retry_after: estimated seconds until then, None if unknown.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class DeadlinePassed(PreluNetError):  # noqa: N818
    """The caller's deadline has passed, or is too short for the request."""


class CheckFailed(PreluNetError):  # noqa: N818
    """A check that the user requested did not pass."""


class CannotTell(PreluNetError):  # noqa: N818
    """A check that the user requested neither passed nor failed: there are too few images."""


@dataclass(frozen=True)
class ErrorStatus:
    """The exit code, gRPC status and HTTP status of one class of errors."""

    exit_code: int
    grpc_status: str  # a name of grpc.StatusCode; a string, so that this module does not import grpc
    http_status: int


INTERNAL = ErrorStatus(1, "INTERNAL", 500)  # an error that is not in the table is a bug of ours

# HTTP: a faulty model that is served is not the client's fault; CANCELLED means that the server is stopping, since a
# client that has cancelled its own call gets no answer.
ERROR_STATUSES: dict[type[PreluNetError], ErrorStatus] = {
    UsageError: ErrorStatus(2, "INVALID_ARGUMENT", 400),
    DivergenceError: ErrorStatus(2, "INVALID_ARGUMENT", 400),
    ImageError: ErrorStatus(2, "INVALID_ARGUMENT", 400),
    ImageTooLarge: ErrorStatus(2, "INVALID_ARGUMENT", 413),
    DatasetError: ErrorStatus(2, "INVALID_ARGUMENT", 400),
    RunFolderError: ErrorStatus(2, "FAILED_PRECONDITION", 500),
    ModelNotFound: ErrorStatus(2, "NOT_FOUND", 404),
    ModelRefused: ErrorStatus(3, "FAILED_PRECONDITION", 400),
    Unauthenticated: ErrorStatus(2, "UNAUTHENTICATED", 401),
    PermissionDenied: ErrorStatus(2, "PERMISSION_DENIED", 403),
    ContractError: ErrorStatus(3, "FAILED_PRECONDITION", 500),
    CheckpointError: ErrorStatus(3, "FAILED_PRECONDITION", 500),
    Interrupted: ErrorStatus(4, "CANCELLED", 503),
    EnvironmentFault: ErrorStatus(5, "UNAVAILABLE", 503),
    MissingExtra: ErrorStatus(5, "UNAVAILABLE", 503),
    OutOfMemory: ErrorStatus(5, "RESOURCE_EXHAUSTED", 429),
    DeviceLost: ErrorStatus(5, "UNAVAILABLE", 503),
    NotReady: ErrorStatus(5, "UNAVAILABLE", 503),
    Overloaded: ErrorStatus(5, "RESOURCE_EXHAUSTED", 429),
    DeadlinePassed: ErrorStatus(5, "DEADLINE_EXCEEDED", 504),
    CheckFailed: ErrorStatus(6, "DATA_LOSS", 500),
    CannotTell: ErrorStatus(7, "DATA_LOSS", 500),
}

for _kind in (PreluNetError, *ERROR_STATUSES):
    _kind.__module__ = "prelunet"  # where users import it from: tracebacks name it so


def error_status(error: BaseException) -> ErrorStatus:
    """Return the statuses of an error; INTERNAL if it is not a PreluNetError."""
    for kind in type(error).__mro__:
        if kind in ERROR_STATUSES:
            return ERROR_STATUSES[kind]
    return INTERNAL


_EXTRA_OF_MODULE = {
    "torch": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "onnx": "adopt",
    "pyarrow": "parquet",
    "scipy": "report",
    "vl_convert": "report",
    "opentelemetry": "otel",
    "mlflow": "mlflow",
}


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of prelunet, from where it was installed (recorded by pip: PEP 610)."""
    from importlib.metadata import distribution  # here: slow to import, and few programs need it

    recorded = distribution("prelunet").read_text("direct_url.json")
    if recorded is None:  # from a package index
        return f"pip install 'prelunet[{extra}]'"
    source = json.loads(recorded)
    url, repository = urlsplit(source["url"]), source.get("vcs_info")
    if url.scheme == "file" and not os.path.exists(unquote(url.path)):  # noqa: PTH110 - as in an image built elsewhere
        return f"pip install 'prelunet[{extra}]'"
    if repository is not None:
        return f"pip install 'prelunet[{extra}] @ {repository['vcs']}+{source['url']}@{repository['commit_id']}'"
    if "dir_info" not in source:
        return f"pip install 'prelunet[{extra}] @ {source['url']}'"
    editable = "-e " if source["dir_info"].get("editable") else ""
    return f"pip install {editable}'{unquote(url.path)}[{extra}]'"


def from_missing_module(error: ModuleNotFoundError) -> MissingExtra | None:
    """Convert the import error of a module that an extra installs; None for any other module."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF_MODULE.get(package)
    if extra is None:
        return None
    return MissingExtra(f"this needs {package}, which is not installed. Install it: {install_hint(extra)}")


def import_from_extra(module: str) -> Any:
    """Return a module that an extra installs, imported when it is needed. Raises MissingExtra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise from_missing_module(error) or error from error


# Errors of the operating system when the machine, not the user's input, is at fault.
_MACHINE_ERRNOS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file would be larger than this machine's limit; raise it with: ulimit -f unlimited",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder that this user can write to",
    errno.EPERM: "not permitted; choose a folder that this user can write to",
    errno.EADDRINUSE: "the address is in use; choose another port or stop the other program",
    errno.EMFILE: "too many open files; raise the limit with: ulimit -n",
    errno.EIO: "the device failed to read or write",
}


# Errors when a path is wrong.
_PATH_ERRNOS = {
    errno.ENOENT: "no such file or folder; give an existing path",
    errno.EISDIR: "is a folder, but should be a file; move it away, or give another path",
    errno.ENOTDIR: "a part of the path is a file, but should be a folder; move it away, or give another path",
    errno.EEXIST: "already exists; move it away, or give another path",
    errno.ELOOP: "is a link that leads back to itself; remove it, or give another path",
    errno.ENAMETOOLONG: "the name is too long for the file system; give a shorter one",
}


def from_os_error(error: OSError) -> PreluNetError:
    """Convert an error of the operating system to one of ours that names the file and the fix."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _MACHINE_ERRNOS:
        return EnvironmentFault(f"{where}{_MACHINE_ERRNOS[error.errno]}")
    if error.errno in _PATH_ERRNOS:
        return UsageError(f"{where}{_PATH_ERRNOS[error.errno]}")
    return UsageError(f"{where}{error.strerror or error}")
