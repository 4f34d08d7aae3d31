"""A folder of models, DIR/NAME/VERSION/model.onnx, whose newest versions a server loads while it serves.

The folder is looked at every second. Of each model the newest version is served that can be loaded. A new one is loaded
beside the one before it, checked with its golden images and warmed up; then it takes all new calls, and calls in flight
finish on the version that they began with. If anything is wrong with it, what is served stays, and the reason is in
the log, in `prelunet_reloads_total` and in the lists of models.
"""

import asyncio
import gc
import glob
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..engine.session import Placement, Session
from ..errors import EnvironmentFault, Interrupted, ModelNotFound, ModelRefused, PreluNetError, UsageError
from .concurrency import shielded
from .memory import require_room_to_load, serving_memory
from .models import Models, load_model
from .observability.logs import release_frames
from .options import MODEL_NAME, ModelFile, ServeOptions
from .watched_files import INTERVAL, in_thread

FILE = "model.onnx"
_PATH = re.compile(rf"({MODEL_NAME.pattern})/([1-9][0-9]{{0,8}})/{re.escape(FILE)}")
_RULE = (
    f"a version is in NAME/VERSION/{FILE}; NAME has up to 100 letters, digits, '.', '_' and '-', the first a letter or "
    "digit, and VERSION is a number from 1 to 999999999, without zeros in front"
)
_DELETED, _STOPPING = "its file has been deleted; it is served from memory", "the server is stopping"
_MAX_QUOTED = 100  # characters of a client's text in an error message

log = logging.getLogger(__name__)


class Version(NamedTuple):
    """A version of a model."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}/{self.number}"


Signature: TypeAlias = tuple[int, int, int]  # size, time of the last change and inode of a file
Look: TypeAlias = Mapping[Version, Signature]
Chosen: TypeAlias = tuple[set[Version], dict[Version, tuple[Signature, PreluNetError]], set[Version]]


class Repository:
    """Keeps the served models equal to those in a folder. All methods belong to the event loop's thread.

    stopped: whether the server stops, so that nothing is loaded any more; chosen: by another process of the server;
    relay: has all its processes load or unload a model, by default only this one.
    """

    def __init__(
        self,
        folder: Path,
        models: Models,
        options: ServeOptions,
        stopped: Callable[[], bool],
        chosen: Chosen | None = None,
    ) -> None:
        self._folder, self._models, self._options, self._stopped = folder, models, options, stopped
        self.relay: Callable[[str, str], Coroutine[Any, Any, None]] = self.change
        self._fixed = {file.name for file in options.models}
        self._lock = asyncio.Lock()  # one load at a time: each takes much memory
        self._last_look: Look = {}
        self._loaded: dict[Version, Signature] = {}
        # Versions loaded by their number, until they are unloaded; those to be tried again once their file changes.
        self._kept: set[Version] = set()
        self._refused: dict[Version, tuple[Signature, PreluNetError]] = {}
        if chosen is not None:
            self._kept, self._refused = set(chosen[0]), dict(chosen[1])
        self._chosen = chosen
        self._deleted: set[Version] = set()  # loaded ones
        self._unknown: set[Path] = set()  # ONNX files in the folder that are no version
        for outcome in ("loaded", "refused", "deleted", "unloaded"):
            self._count(outcome, 0)

    def problems(self) -> dict[Version, str]:
        """Return the versions that are not served, and why, and those that are served but no longer in the folder."""
        problems = {version: str(fault) for version, (_, fault) in self._refused.items()}
        return dict(sorted((problems | dict.fromkeys(self._deleted, _DELETED)).items()))

    @property
    def chosen(self) -> Chosen:
        """Return what clients and files have decided, for another process that is to serve the same."""
        return self._kept, self._refused, set(self._loaded)

    def retry(self) -> None:
        """Let the next look try again what was refused, and load what was unloaded."""
        self._refused = {}

    async def start(self) -> None:
        """Load the newest version of each model that can be loaded; the others are reported as they are later.

        Only here half-written files are not waited for: an older version is tried instead. Raises ModelRefused, or
        EnvironmentFault if the machine is at fault, if no model at all is served, or with `--strict` if a version could
        not be loaded; UsageError for a missing folder, and for an empty one if there is no other model.
        """
        self._last_look = look = await in_thread(self._look, reads="models")
        if not look and self._chosen is None and (self._options.strict or not self._fixed or not self._folder.is_dir()):
            problem = "no model there" if self._folder.is_dir() else "no such folder"
            raise UsageError(
                f"--models {self._folder}: {problem}. Create NAME/VERSION/{FILE} in it, as in flowers/1/{FILE}"
            )
        for name in sorted({version.name for version in look}):
            await self._update(name, look)
        for version in self._kept & set(look):
            await self._ensure_loaded(version, look)
        if self._chosen is not None:  # the others serve, so this one has to serve the same
            for version in self._chosen[2] if not self._stopped() else ():
                if version not in self._loaded and not self._is_superseded(version, look):
                    fault = self._refused.get(version, (None, ModelRefused("its file was deleted")))[1]
                    raise type(fault)(f"{version}, which the other processes serve: {fault}")
            return
        if self._refused and not self._stopped() and (self._options.strict or not self._models.all()):
            version, (_, fault) = next(iter(self._refused.items()))
            raise type(fault)(f"--models {self._folder}: {version}: {fault}")

    def _is_superseded(self, version: Version, look: Look) -> bool:
        """Return whether another version is served in the place of one: a newer one, or any if its file was deleted."""
        own = [loaded.number for loaded in self._loaded if loaded.name == version.name]
        return version not in self._kept and bool(own) and (version not in look or max(own) > version.number)

    async def watch(self) -> None:
        """Look at the folder at intervals. A version counts once two looks find it unchanged."""
        while True:
            await asyncio.sleep(INTERVAL)
            async with self._lock:
                look, before = await in_thread(self._look, reads="models"), self._last_look
                self._last_look = look
                self._refused = {version: of for version, of in self._refused.items() if version in look}
                deleted = {version for version in self._loaded if version not in look}
                for version in deleted - self._deleted:
                    self._count("deleted")
                    log.warning("model %s: %s", version, _DELETED)
                self._deleted = deleted
                settled = {version: found for version, found in look.items() if before.get(version) == found}
                changing = {version.name for version in self._loaded if look.get(version) != before.get(version)}
                for name in sorted({version.name for version in settled} - changing):
                    await self._update(name, settled)
            if len(self._models.sessions()) > len(self._loaded) + len(self._fixed):
                # An error refers to its frames and they to it: a cycle, and through it a call holds its version.
                gc.collect()

    async def load(self, model: str) -> None:
        """Load the newest version of the model NAME, or NAME/VERSION, which then stays until it is unloaded.

        Returns when it is served. Raises ModelNotFound if it is not in the folder, ModelRefused with the reason if it
        cannot be loaded.
        """
        await shielded(self.relay("load", model))

    async def change(self, change: str, model: str) -> None:
        """Load or unload in this process. change: "load" or "unload"."""
        await (self._load(model) if change == "load" else self._unload(model))

    async def _load(self, model: str) -> None:
        async with self._lock:
            look = await in_thread(self._look, reads="models")
            wanted = _matching(look, model)
            if not wanted:
                raise ModelNotFound(
                    f"the server's folder has no model '{model[:_MAX_QUOTED]}'; it should be in NAME/VERSION/{FILE}"
                )
            for version in wanted:
                self._refused.pop(version, None)
            if "/" not in model:
                await self._update(wanted[0].name, look)
            elif await self._ensure_loaded(wanted[0], look):
                self._kept.add(wanted[0])
            if (refused := self._refused.get(wanted[0])) is not None:
                raise ModelRefused(f"{wanted[0]}: {refused[1]}")

    async def unload(self, model: str) -> None:
        """Stop serving all versions of the model NAME, or only NAME/VERSION, until it is loaded or its file changes.

        If it was the newest, the next older version in the folder takes its place first. Raises ModelNotFound if it is
        not loaded, UsageError for a model of `--model`.
        """
        await shielded(self.relay("unload", model))

    async def _unload(self, model: str) -> None:
        async with self._lock:
            look = await in_thread(self._look, reads="models")
            removed = _matching(self._loaded, model)
            if not removed:
                if self._models.has(model):
                    raise UsageError(f"model '{model}' was given by --model and stays until the server stops")
                raise ModelNotFound(f"model '{model[:_MAX_QUOTED]}' is not loaded")
            for version in _matching(look, model):
                self._refused[version] = look[version], ModelRefused("unloaded")
            for version in removed:
                del self._loaded[version]
            if "/" in model:
                await self._update(removed[0].name, look)
            for version in removed:
                self._remove(version)
                self._count("unloaded")
                log.info("model %s is unloaded", version)

    # One model

    async def _update(self, name: str, look: Look) -> bool:
        """Serve the newest version of a model that can be loaded, in place of others; False if there is none."""
        for version in _matching(look, name):
            refused = version in self._refused and self._refused[version][0] == look[version]
            if (not refused and await self._ensure_loaded(version, look)) or version in self._loaded:
                for other in _matching(self._loaded, name):
                    if other != version and other not in self._kept:
                        self._remove(other)
                return True
        return False

    async def _ensure_loaded(self, version: Version, look: Look) -> bool:
        """Load a version unless it is loaded, and serve it. If that fails, note the reason and return False."""
        signature = look[version]
        if self._loaded.get(version) == signature:
            return True
        served, placement = self._models.versions(version.name), self._options.placement
        if served and served[0].session.circumstances.on_gpu:
            placement = served[0].session.placement  # with `auto`, a model must not move to the CPU for lack of memory
        log.info("loading model %s", version)
        sessions, queues = self._models.sessions(), len(self._models.all()) + (not served)
        try:
            session = await in_thread(self._prepare, version, signature, placement, sessions, queues)
            if self._stopped():
                raise Interrupted(_STOPPING)
        except Exception as error:  # whatever it is, what is served stays, and later versions are tried
            reason = str(error).replace(f"{self._folder}/", "") or type(error).__name__
            release_frames(error)
            kind = EnvironmentFault if isinstance(error, EnvironmentFault) else ModelRefused
            self._refused[version] = signature, kind(reason)
            self._count("refused")
            stays = f"; version {served[0].version} stays" if served else ""
            log.error("model %s is not served%s: %s", version, stays, reason)
            return False
        self._models.add(self._file(version), session)
        self._loaded[version] = signature
        self._refused.pop(version, None)
        self._count("loaded")
        if served and served[0].session.contract.classes != session.contract.classes:
            log.warning("model %s has other classes than version %s", version, served[0].version)
        return True

    def _prepare(
        self, version: Version, signature: Signature, placement: Placement, sessions: Sequence[Session], queues: int
    ) -> Session:
        """Load, check and warm up a version, in a thread. sessions, queues: in memory; see `serving_memory`."""
        if self._stopped():
            raise Interrupted(_STOPPING)
        file = self._file(version)
        if version.name in self._fixed:
            raise ModelRefused("a model of this name was given by --model; rename this folder")
        require_room_to_load(file.path, sessions, self._options, queues)
        session = load_model(file, placement, self._stopped)
        serving_memory([*sessions, session], self._options, queues)
        if _signature(file.path) != signature:
            raise ModelRefused("its file changed while it was loaded")
        return session

    def _remove(self, version: Version) -> None:
        self._models.remove(version.name, str(version.number))
        self._loaded.pop(version, None)
        self._kept.discard(version)
        self._deleted.discard(version)

    def _file(self, version: Version) -> ModelFile:
        return ModelFile(version.name, self._folder / version.name / str(version.number) / FILE, version.number)

    def _look(self) -> Look:
        """Return the versions in the folder, none where it cannot be read, and note the ONNX files that are none."""
        look: dict[Version, Signature] = {}
        unknown = set()
        for depth in ("", "*/", "*/*/"):
            pattern = f"{glob.escape(str(self._folder))}/{depth}*.onnx"
            for path in map(Path, glob.iglob(pattern)):  # noqa: PTH207 - Path.glob raises for a folder deleted meanwhile
                relative = path.relative_to(self._folder)
                if (found := _PATH.fullmatch(str(relative))) is None:
                    unknown.add(relative)
                else:
                    with suppress(OSError):  # deleted meanwhile
                        look[Version(found[1], int(found[2]))] = _signature(path)
        for path in sorted(unknown - self._unknown):
            log.warning("%s is ignored: %s", path, _RULE)
        self._unknown = unknown
        return look

    def _count(self, outcome: str, number: int = 1) -> None:
        self._models.metrics.reloads.labels("models", outcome).inc(number)


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _matching(versions: Iterable[Version], model: str) -> list[Version]:
    """Return those of the model NAME, or the one NAME/VERSION; the newest first."""
    return sorted((each for each in versions if model in (each.name, str(each))), reverse=True)
