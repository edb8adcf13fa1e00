"""What one agent process was started with: the configuration files, its rank, and the folders it may write to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefill_runtime.agent.config import (
    CALIBRATION_FILE,
    CONFIG_DIR,
    CONFIG_FILE,
    INCARNATION_FILE,
    RANK_ENV,
    STATE_DIR,
    EndReason,
    LastWords,
    RankConfig,
)
from pydantic import BaseModel, ValidationError

TERMINATION_LOG = Path("/dev/termination-log")
MESSAGE_LIMIT = 3000


class BadConfigurationError(Exception):
    """The rank cannot even start; the message names the file or variable and what is wrong with it."""


@dataclass(frozen=True)
class Places:
    """Where the agent reads and writes; the defaults are those of a pod."""

    config: Path = CONFIG_DIR
    state: Path = STATE_DIR
    termination: Path = TERMINATION_LOG

    @property
    def calibration(self) -> Path:
        """What the profile step leaves for the engine step."""
        return self.state / CALIBRATION_FILE

    @property
    def telemetry_socket(self) -> Path:
        return self.state / "telemetry.sock"


@dataclass(frozen=True)
class Settings:
    config: RankConfig
    rank: int
    incarnation: str
    calibration: str
    places: Places

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def solitary(self) -> bool:
        return self.config.group.pods == 1


def read_settings(places: Places, environ: Mapping[str, str] = os.environ) -> Settings:
    """Raises BadConfigurationError."""
    text = _read(places.config / CONFIG_FILE)
    try:
        config = RankConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise BadConfigurationError(f"{places.config / CONFIG_FILE}: {where}: {first['msg']}") from None
    if config.engine.pipeline % config.group.pods:
        raise BadConfigurationError(
            f"{config.engine.pipeline} pipeline stages cannot be spread evenly over {config.group.pods} pods"
        )
    return Settings(
        config=config,
        rank=_rank(environ, config.group.pods),
        incarnation=_read(places.config / INCARNATION_FILE).strip(),
        calibration=_read(places.config / CALIBRATION_FILE, missing="").strip(),
        places=places,
    )


def _read(path: Path, missing: str | None = None) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise BadConfigurationError(f"{path} is missing; the operator shows the pod's annotations there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfigurationError(f"{path} cannot be read: {error}") from None


def _rank(environ: Mapping[str, str], pods: int) -> int:
    text = environ.get(RANK_ENV, "")
    if not text.isdecimal() or int(text) >= pods:
        raise BadConfigurationError(f"{RANK_ENV} is {text!r}, expected a pod index from 0 to {pods - 1}")
    return int(text)


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def leave_message(places: Places, document: BaseModel) -> None:
    """Write the termination message. In a pod it is a bind-mounted file, so it must be written in place."""
    text = document.model_dump_json(by_alias=True, exclude_none=True)
    try:
        places.termination.write_text(text)
    except OSError as error:
        print(f"prefill-agent: termination message not written to {places.termination}: {error}", flush=True)


def shorten(text: str, limit: int) -> str:
    """Beginning and end of a text that is too long: the one names the cause, the other shows it."""
    if len(text) <= limit:
        return text
    cut = "\n[...]\n"
    head = limit // 3
    return text[:head] + cut + text[len(text) - (limit - head - len(cut)) :]


def shorten_json(text: str, size: int) -> str:
    """``text`` so short that it takes at most ``size`` bytes as part of a JSON document."""
    limit = size
    while (over := len(json.dumps(shorten(text, limit), ensure_ascii=False).encode()) - 2 - size) > 0:
        limit = min(limit, len(text)) - max(1, over // 6)  # a character takes six bytes at most
    return shorten(text, limit)


def leave_last_words(places: Places, reason: EndReason, message: str, rank: int) -> None:
    leave_message(places, LastWords(reason=reason, message=shorten_json(message, MESSAGE_LIMIT), rank=rank))
