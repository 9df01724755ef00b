"""One program a robot: a lock for each address that a robot's devices have, on this machine.

The kernel releases it when the process ends, however that happens. A lock is a file in a folder of this user alone;
another user, a container with a /tmp of its own, or another machine is not seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from prism.errors import PrismError
from prism.io.files import explain

# Not TMPDIR, which may differ between programs: all must see the same folder.
FOLDER = Path("/tmp") / f"prism-{os.getuid() if hasattr(os, 'getuid') else 0}"


def host_address(host: str) -> str:
    """Two names of one host are one address."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host.lower()


class Claim:
    """`take` all addresses or none of them; `release` twice is once."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def take(self, addresses: Iterable[str], robot: str) -> None:
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            return
        folder = _folder()
        try:
            for address in sorted(set(addresses)):
                name = re.sub(r"[^A-Za-z0-9.:=-]+", "_", address)[:200]
                file = os.open(
                    name + ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
                )
                self._held.append(file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    who = os.pread(file, 20, 0).decode(errors="replace").strip()
                    raise PrismError(
                        f"robot '{robot}' ({address}): another program on this machine drives it (process {who}); "
                        "stop that first. --dry-run only reads, and may run beside it"
                    ) from None
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.release()
            raise PrismError(
                f"{FOLDER}: the lock of robot '{robot}' cannot be taken: {'; '.join(explain(error))}"
            ) from None
        except PrismError:
            self.release()
            raise
        finally:
            os.close(folder)

    def release(self) -> None:
        while self._held:
            with contextlib.suppress(OSError):
                os.close(self._held.pop())


def _folder() -> int:
    """Open, and owned by this user: in /tmp another user could have put a link there."""
    with contextlib.suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    try:
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PrismError(f"{FOLDER}: must be a folder, for the locks of robots ({error.strerror})") from None
    found = os.fstat(folder)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(folder)
        raise PrismError(f"{FOLDER}: another user may write there; remove it, or `chmod 700` it")
    return folder
