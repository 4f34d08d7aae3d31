"""Every error that a user can meet, and the one table that maps it to an exit code and a gRPC status.

    PreluNetError
    ├── UsageError            an option, a path or a class list that cannot be used
    │   └── DivergenceError   a training whose numbers are no longer finite
    ├── ImageError            bytes that are no image, or one beyond the limits
    ├── DatasetError          a folder or archive that is no labelled dataset
    ├── RunFolderError        a run folder of another model, dataset or protocol, or a damaged one
    ├── ModelNotFound         a model name that the server does not serve
    ├── ContractError         an ONNX file that is not ours, is damaged or too new
    ├── CheckpointError       the same for a checkpoint
    ├── Interrupted           stopped by a signal; the same command resumes
    ├── EnvironmentFault      device, disk, port, server or an extra that is missing
    │   ├── OutOfMemory       a device that has too little of it for a batch
    │   ├── DeviceLost        a device that gives nothing but errors until the process is started anew
    │   └── NotReady          a server that still loads its models, or stops
    ├── Overloaded            try later
    ├── DeadlinePassed        the time that the caller gave is over
    └── CheckFailed           a check that was asked for did not pass

Libraries raise; only the command line prints and exits, only the server sets a status.
"""

import errno
from dataclasses import dataclass


class PreluNetError(Exception):
    """Base of all errors whose text is meant for the user: what, where, and how to mend it."""


class UsageError(PreluNetError):
    """An option, a path or a class list cannot be used as given."""


class DivergenceError(UsageError):
    """A number of a training is no longer finite; a lower rate may keep it so."""


class ImageError(PreluNetError):
    """The bytes are no image that we accept; the caller must send another."""


class DatasetError(PreluNetError):
    """A folder or archive is not a labelled dataset, or does not fit the model's classes."""


class RunFolderError(PreluNetError):
    """A run folder belongs to another model, dataset or protocol, or is damaged."""


class ModelNotFound(PreluNetError):  # noqa: N818
    """The server serves no model of that name."""


class ContractError(PreluNetError):
    """An ONNX file does not keep the contract of docs/contract.md."""


class CheckpointError(PreluNetError):
    """A checkpoint is damaged, incomplete or of another format."""


class Interrupted(PreluNetError):  # noqa: N818 - not a fault: the work resumes
    """A signal stopped the work between two safe points; the same command resumes it."""


class EnvironmentFault(PreluNetError):  # noqa: N818
    """The machine lacks something: device, disk space, a free port, a server, an installed extra."""


class OutOfMemory(EnvironmentFault):
    """A device has too little memory for a batch; a smaller one may fit."""


class DeviceLost(EnvironmentFault):
    """A device gives nothing but errors until the process is started anew."""


class NotReady(EnvironmentFault):
    """The server still loads its models, or stops."""


class Overloaded(PreluNetError):  # noqa: N818
    """The server has as much waiting as it accepts; the same call may succeed later.

    retry_after: seconds after which it probably will, None where nobody can tell.
    """

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class DeadlinePassed(PreluNetError):  # noqa: N818
    """The time that the caller gave is over, or too short for what was asked."""


class CheckFailed(PreluNetError):  # noqa: N818
    """A check that the user asked for did not pass."""


@dataclass(frozen=True)
class ErrorStatus:
    """How one kind of error is told to the outside."""

    exit_code: int
    grpc_status: str  # a name of grpc.StatusCode; a string, so that this module needs no grpc


INTERNAL = ErrorStatus(1, "INTERNAL")  # anything that is not in the table is our own mistake

ERROR_STATUSES: dict[type[PreluNetError], ErrorStatus] = {
    UsageError: ErrorStatus(2, "INVALID_ARGUMENT"),
    DivergenceError: ErrorStatus(2, "INVALID_ARGUMENT"),
    ImageError: ErrorStatus(2, "INVALID_ARGUMENT"),
    DatasetError: ErrorStatus(2, "INVALID_ARGUMENT"),
    RunFolderError: ErrorStatus(2, "FAILED_PRECONDITION"),
    ModelNotFound: ErrorStatus(2, "NOT_FOUND"),
    ContractError: ErrorStatus(3, "FAILED_PRECONDITION"),
    CheckpointError: ErrorStatus(3, "FAILED_PRECONDITION"),
    Interrupted: ErrorStatus(4, "CANCELLED"),
    EnvironmentFault: ErrorStatus(5, "UNAVAILABLE"),
    OutOfMemory: ErrorStatus(5, "RESOURCE_EXHAUSTED"),
    DeviceLost: ErrorStatus(5, "UNAVAILABLE"),
    NotReady: ErrorStatus(5, "UNAVAILABLE"),
    Overloaded: ErrorStatus(5, "RESOURCE_EXHAUSTED"),
    DeadlinePassed: ErrorStatus(5, "DEADLINE_EXCEEDED"),
    CheckFailed: ErrorStatus(6, "DATA_LOSS"),
}


def error_status(error: BaseException) -> ErrorStatus:
    """Return the exit code and gRPC status of an error; INTERNAL for what is not a PreluNetError."""
    for kind in type(error).__mro__:
        if kind in ERROR_STATUSES:
            return ERROR_STATUSES[kind]
    return INTERNAL


_EXTRA_OF_MODULE = {"torch": "train", "onnx": "train", "safetensors": "train"}


def install_hint(extra: str) -> str:
    """Return the command that brings an extra of prelunet."""
    return f"pip install '.[{extra}]' in a checkout of prelunet"


def from_missing_module(error: ModuleNotFoundError) -> EnvironmentFault | None:
    """Turn the import error of a module that an extra brings into one of ours; None for any other module."""
    extra = _EXTRA_OF_MODULE.get((error.name or "").split(".")[0])
    if extra is None:
        return None
    return EnvironmentFault(f"this needs {error.name}, which is not installed. Bring it: {install_hint(extra)}")


# What the operating system says when the machine, not the user's input, is at fault.
_MACHINE_ERRNOS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file would be larger than this machine's limit; raise it with: ulimit -f unlimited",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder that this user may write",
    errno.EPERM: "not permitted; choose a folder that this user may write",
    errno.EADDRINUSE: "the address is in use; choose another port or stop the other program",
    errno.EMFILE: "too many open files; raise the limit with: ulimit -n",
    errno.EIO: "the device failed to read or write",
}


# And when a path is not what it should be.
_PATH_ERRNOS = {
    errno.ENOENT: "no such file or folder; give a path that is there",
    errno.EISDIR: "a folder where a file should be; move it away, or give another path",
    errno.ENOTDIR: "a file where a folder should be; move it away, or give another path",
    errno.EEXIST: "something is there already; move it away, or give another path",
    errno.ELOOP: "a link that leads back to itself; remove it, or give another path",
    errno.ENAMETOOLONG: "the name is too long for the file system; give a shorter one",
}


def from_os_error(error: OSError) -> PreluNetError:
    """Turn an error of the operating system into one of ours, naming the file and the mend."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _MACHINE_ERRNOS:
        return EnvironmentFault(f"{where}{_MACHINE_ERRNOS[error.errno]}")
    if error.errno in _PATH_ERRNOS:
        return UsageError(f"{where}{_PATH_ERRNOS[error.errno]}")
    return UsageError(f"{where}{error.strerror or error}")
