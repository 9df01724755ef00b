"""The Hugging Face hub: hf://USER/NAME[@REVISION] as a folder on this computer, and a folder as hf://USER/NAME.

Through huggingface_hub, with its cache, its login and its switches (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE=1):
what is in the cache needs no network.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from prism.errors import PrismError, reason

Kind = Literal["model", "dataset"]
_ID = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")  # as a Path, hf:// is hf:/


def is_hub(path: Path | str) -> bool:
    return str(path).startswith("hf:/")


def name_of(path: Path | str) -> str:
    """NAME of hf://USER/NAME@REVISION."""
    match = _ID.fullmatch(str(path).rstrip("/"))
    if match is None:
        raise PrismError(f"'{path}': a name on the hub is hf://USER/NAME, or hf://USER/NAME@REVISION")
    return match[1].partition("/")[2]


def fetch(path: Path | str, kind: Kind, patterns: Sequence[str] | None = None) -> Path:
    """The files of hf://USER/NAME (those that match `patterns`) in the cache, brought there where they are not."""
    match = _ID.fullmatch(str(path).rstrip("/"))
    if match is None:
        raise PrismError(f"'{path}': a name on the hub is hf://USER/NAME, or hf://USER/NAME@REVISION")
    hub = _library(f"hf://{match[1]}")
    with _explained(f"hf://{match[1]}", kind):
        folder = hub.snapshot_download(match[1], repo_type=kind, revision=match[2], allow_patterns=patterns)
    return Path(folder)


def push(folder: Path, name: str, private: bool = False) -> str:
    """Upload a folder as the model USER/NAME, which is made where it is not there; its address."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise PrismError(f"--hub {name}: write it as USER/NAME")
    hub = _library(name)
    with _explained(name, "model"):
        url = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a policy of PRISM")
    return str(url)


def _library(what: str) -> Any:
    try:
        if not sys.stderr.isatty():
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        import huggingface_hub
    except ImportError:
        raise PrismError(f"{what} is on the Hugging Face hub, which needs: pip install 'prism-policy[hub]'") from None
    return huggingface_hub


@contextmanager
def _explained(name: str, kind: Kind) -> Iterator[None]:
    """One line for what can go wrong between here and the hub."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise PrismError(f"{name}: its owner has to let you in; ask on its page, then: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise PrismError(f"{name}: no such {kind} on the hub, or a private one; check it, or: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise PrismError(f"{name}: the {kind} has no such revision; check what is behind the @") from None
    except errors.HFValidationError as error:
        raise PrismError(f"{name}: is not a valid name on the hub ({reason(error)})") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise PrismError(
            f"{name}: is not in the cache, and the hub cannot be reached; connect, unset HF_HUB_OFFLINE, or fetch it "
            "on a computer with a connection and copy the folder that HF_HOME names"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedy = "log in with a token that may write: hf auth login" if status in (401, 403) else "try again later"
        raise PrismError(f"{name}: the hub answered {status or reason(error)}; {remedy}") from None
    except OSError as error:  # no connection, no space
        raise PrismError(f"{name}: {reason(error)}; check the connection and the free space") from None
