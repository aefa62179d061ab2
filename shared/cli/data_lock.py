"""One fleet at a time on a data folder: a lock in it, which the kernel lets go of with the process at the latest.

A lock is found by its path. Who removes the folder, or the file, leaves whoever holds it with a lock that nobody meets.
"""

import fcntl
import os
from io import FileIO
from pathlib import Path

from shared.cli.exits import Exit, Stop

_NAME = "up.lock"


class DataLock:
    """The hold of this process on a data folder; `url` is where its fleet serves, for whoever comes second."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._file: FileIO | None = None

    @property
    def held(self) -> bool:
        """False if nobody who comes now would meet this lock: the folder or the file is gone, or is another one."""
        if self._file is None:
            return False
        try:
            return os.path.samestat((self._folder / _NAME).stat(), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            # Nothing is known: a folder that cannot be looked into keeps everyone else off as well.
            return True

    def take(self) -> None:
        """Hold the folder, which is made if it is not there; once more if it is held no longer.

        Raises `Stop` if another process holds it, or it cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Unbuffered: what a full disk does not take must not come up once more when the file is closed.
            lock = FileIO(self._folder / _NAME, "a+")
            try:
                self._fill(lock)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise Stop(Exit.NOT_STARTED, f"cannot write in the data folder {self._folder}: {error.strerror}") from error
        self.release()
        self._file = lock

    def _fill(self, lock: FileIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "unknown"
            raise Stop(
                Exit.NOT_STARTED,
                f"another `diffleet up` ({holder}) uses {self._folder}; stop it, or give this one its own --data-dir",
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()}, {self._url}\n".encode())

    def release(self) -> None:
        """Let go, if anything is held."""
        if self._file is not None:
            with self._file as lock:
                lock.truncate(0)
            self._file = None
