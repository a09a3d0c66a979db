"""The settings of the process: each with meaning, unit, bounds and default, from flags, environment and a file.

The tunables of a memory are its policy (core/policy.py); settings apply to the whole server. Precedence: a command-line
flag, then the environment (MEMSTREAM_ and the name in capitals), then the TOML file, then the default. docs/settings.md
is generated from `Settings`.

sections: the settings by subject
values: kinds, addresses and URLs, and the declaration of a setting
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from memstream_server.settings.sections import (
    AccessSettings,
    EmbeddingSettings,
    ImageSettings,
    IndexSettings,
    JournalSettings,
    LlmSettings,
    NextEmbeddingSettings,
    RequestSettings,
    RerankerSettings,
    ServerSettings,
    StreamSettings,
    TokenizerSettings,
    WorkingMemorySettings,
)
from memstream_server.settings.values import (
    EmbeddingKind,
    LogFormat,
    LogLevel,
    StructuredReplies,
    is_loopback,
    parse_listen,
)

__all__ = [
    "ENV_PREFIX",
    "EmbeddingKind",
    "LogFormat",
    "LogLevel",
    "Settings",
    "SettingsError",
    "StructuredReplies",
    "is_loopback",
    "load",
    "parse_listen",
    "unknown_variables",
]

ENV_PREFIX = "MEMSTREAM_"
CONFIG_VARIABLE = "MEMSTREAM_CONFIG"
_file: ContextVar[Path | None] = ContextVar("_file", default=None)
"""The TOML file that `load` reads. A subclass of Settings with that file would take as long as Settings itself."""


class SettingsError(ValueError):
    """A setting is unknown, malformed or out of bounds; the text names each. The operator must correct it."""


RETIRED = {
    "dense_in_memory_max": "it counted fragments, and is gone: dense_bytes_max bounds the same vectors by their bytes"
}
"""Settings of the version before, with what to do: a start refuses them."""


# Pydantic orders inherited fields from the last base class to the first: docs/settings.md begins with ServerSettings.
class Settings(
    JournalSettings,
    ImageSettings,
    WorkingMemorySettings,
    StreamSettings,
    RequestSettings,
    LlmSettings,
    NextEmbeddingSettings,
    RerankerSettings,
    TokenizerSettings,
    EmbeddingSettings,
    IndexSettings,
    AccessSettings,
    ServerSettings,
    BaseSettings,
):
    """All settings of a server process. Immutable; create one with `load`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_retired(cls, given: Any) -> Any:
        variables = {name.upper() for name in os.environ}
        for name, hint in RETIRED.items():
            if (isinstance(given, dict) and name in given) or f"{ENV_PREFIX}{name.upper()}" in variables:
                raise ValueError(f"{name}: {hint}")
        return given

    @model_validator(mode="after")
    def _check_consistency(self) -> Settings:
        if self.content_max_bytes > self.message_max_bytes // 2:
            raise ValueError("content_max_bytes must be at most half of message_max_bytes")
        if self.content_max_bytes > self.window_bytes:
            raise ValueError("window_bytes must hold at least one content of content_max_bytes")
        if self.lease_renew_s > self.lease_s / 2:
            raise ValueError("lease_renew_s must be at most half of lease_s")
        self.check_access(shared=bool(self.journal_url.get_secret_value()))
        for name, address in (("listen", self.listen), ("http_listen", self.http_listen)):
            if missing := self._lacking_protection(address):
                raise ValueError(
                    f"{name} is {address}, beyond loopback, without {missing}: see docs/security.md; "
                    "insecure_listen listens there all the same"
                )
        return self

    def secrets(self) -> list[str]:
        """Values that must not be shown anywhere."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return [text for value in values if isinstance(value, SecretStr) and (text := value.get_secret_value())]

    @property
    def is_without_index(self) -> bool:
        """Whether the server has no vector index: its journal is on PostgreSQL, and it has no Milvus."""
        return bool(self.journal_url.get_secret_value()) and not self.milvus_uri

    def unprotected(self, allowed: bool = False) -> str:
        """What a port beyond loopback lacks: "TLS", "authentication", or both joined by "and"; empty if nothing.

        `allowed`: whether to return it even if insecure_listen allows it.
        """
        return self._lacking_protection(self.listen, allowed) or self._lacking_protection(self.http_listen, allowed)

    def _lacking_protection(self, address: str, allowed: bool = False) -> str:
        if not address or address.startswith("unix:") or is_loopback(parse_listen(address)[0]):
            return ""
        if self.insecure_listen and not allowed:
            return ""
        lacks = {"TLS": self.tls_cert_file is None, "authentication": not self.authenticates}
        return " and ".join(name for name, lacking in lacks.items() if lacking)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=_file.get())


def load(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The current settings. `config` (else $MEMSTREAM_CONFIG) is a TOML file of names and values.

    `flags` are settings by name; None means not given. Raises SettingsError.
    """
    path = config or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    if path is not None and not path.is_file():
        raise SettingsError(f"there is no settings file {path}")
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    token = _file.set(path)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_describe_problem(item) for item in error.errors(include_url=False))) from None
    except ValueError as error:  # invalid TOML
        raise SettingsError(f"{path}: {error}") from None
    finally:
        _file.reset(token)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """MEMSTREAM_ variables that name no setting: misspelt ones, for a warning at start."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE}
    return sorted(name for name in environment if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)


def _describe_problem(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    what = str(item["msg"]).removeprefix("Value error, ")  # of our own validators
    return f"{name}: {what}" if name else what
