"""Parsing and validation of database URLs, without showing passwords.

The PostgreSQL driver parses most of a URL itself. This module handles what the driver does
differently from libpq, refuses what the driver would misread, and hides passwords.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from replaydb.domain.checks import meant
from replaydb.errors import InvalidURLError, NotSupportedError

EXPECTED: Final = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
CONNECT_SECONDS = 10.0
#: Limit of the pauses of a client in a transaction that may hold locks.
FROZEN_CLIENT_SECONDS = 10.0

_SCHEME = re.compile(r"([A-Za-z]\w*)(?:\+\w+)?://")
_SECRETS = {"password", "sslpassword"}
#: Parameters that name a file, which must exist.
_FILES = {"sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"}
#: Parameters of the session, which are sent to the server.
_SESSION = ("application_name", "options")
#: Parameters that the driver does not know, and their values for what it does anyway.
_UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "channel_binding": ("disable", "prefer"),
    "client_encoding": ("auto", "UTF8", "utf8", "UTF-8", "utf-8"),
    "gssdelegation": ("0",),
    "gssencmode": ("disable", "prefer"),
    "hostaddr": (),
    "load_balance_hosts": ("disable",),
    "max_protocol_version": ("3.0", "3.2", "latest"),
    "min_protocol_version": ("3.0",),
    "require_auth": (),
    "requirepeer": (),
    "requiressl": ("0",),
    "service": (),
    "sslcertmode": ("allow",),
    "sslcompression": ("0",),
    "sslcrldir": (),
    "sslsni": ("1",),
}
_TLS_MODES = ("require", "verify-ca", "verify-full")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sslmode": ("disable", "allow", "prefer", *_TLS_MODES),
    "target_session_attrs": (
        *("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    ),
    "sslnegotiation": ("postgres", "direct"),
    "pgbouncer": ("true", "false", "prepared"),
    "gsslib": ("gssapi", "sspi"),
    **dict.fromkeys(
        ("ssl_min_protocol_version", "ssl_max_protocol_version"),
        ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
    ),
}
#: Environment variables that set a parameter which is not in the URL. The driver reads the names
#: of the user and the database, and the password, itself.
_VARIABLES: Mapping[str, str] = {
    **{
        f"PG{name.replace('_', '').upper()}": name
        for name in (*_UNSUPPORTED, *_CHOICES, *_FILES, "options", "krbsrvname")
        if name not in {"pgbouncer", "passfile"}
    },
    "PGAPPNAME": "application_name",
    "PGCONNECT_TIMEOUT": "connect_timeout",
}
#: Environment variables that set a parameter of the session.
_SETTINGS: Mapping[str, str] = {
    "PGDATESTYLE": "datestyle",
    "PGGEQO": "geqo",
    "PGTZ": "timezone",
}
#: Parameters in seconds; 0: no limit. The second is replaydb's own.
_TIMEOUTS = {"connect_timeout": CONNECT_SECONDS, "frozen_client_timeout": FROZEN_CLIENT_SECONDS}
#: Other parameters that the driver supports.
_OTHERS = {"user", "dbname", "database", "krbsrvname"}
_KNOWN = {"host", "port", "listen", *_TIMEOUTS, *_SECRETS, *_FILES, *_SESSION, *_CHOICES, *_OTHERS}
_KNOWN |= _UNSUPPORTED.keys()


def as_text(url: str | URL) -> str:
    """Return the URL as text, with its password.

    Raises:
        InvalidURLError: It is neither text nor a SQLAlchemy URL, or has characters that no engine
            accepts.
    """
    if not isinstance(url, str | URL):
        raise InvalidURLError("url", EXPECTED, type(url).__name__)
    with suppress(UnicodeEncodeError):  # its text would show the password, also as a context
        text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
        text.encode()
        if "\0" in text:
            raise InvalidURLError("url", "no NUL character", "one")
        return text
    raise InvalidURLError("url", "text that is valid UTF-8", "an unpaired surrogate")


def engine_of(url: str | URL) -> str:
    """Return the scheme of a URL, without the driver.

    Raises:
        InvalidURLError: It is not a URL.
    """
    found = _SCHEME.match(as_text(url))
    if found is None:
        # The text is not repeated, because it may contain a password.
        raise InvalidURLError("url", EXPECTED, "something that is not a URL")
    return found[1].lower()


def sqlite_url(url: str | URL) -> URL:
    """Return a URL that names a file and nothing else.

    Raises:
        InvalidURLError: It has a host or parameters.
        NotSupportedError: It names no file.
    """
    expected = "sqlite:///FILE, or sqlite:////FILE from the root"
    parsed = None
    with suppress(ArgumentError, ValueError):
        parsed = make_url(url)
    if parsed is None:
        raise InvalidURLError("url", expected, "something else")
    if parsed.host or parsed.username or parsed.password:
        raise InvalidURLError("url", expected, "a host: write three slashes instead of two")
    if not parsed.database or parsed.database == ":memory:":
        raise NotSupportedError("an in-memory SQLite database cannot be shared; name a file")
    if "\0" in parsed.database:
        raise InvalidURLError("url", "no NUL character", "one")
    if "?" in as_text(url):  # SQLAlchemy would ignore a parameter without a value, as in `?mode`
        raise InvalidURLError("url", f"{expected}, without parameters", "a question mark")
    return parsed


@dataclass(frozen=True, slots=True)
class PostgresqlURL:
    """A parsed PostgreSQL URL.

    Attributes:
        dsn: URL for the driver, without hosts, settings and replaydb's own parameters. Contains the
            password.
        hosts: Hosts, or folders of sockets, with their ports, in the order of attempts. Empty: the
            driver finds a socket.
        kinds: Values of `target_session_attrs`, each tried on all hosts; None: driver's default.
        connect_seconds: Timeout for each host; None: the timeout of the operating system.
        frozen_seconds: How long a client may pause in a transaction that may hold locks; 0: without
            limit.
        settings: Parameters of the session.
        direct_tls: Whether a connection begins with TLS, without asking whether the server has it.
        through_pgbouncer: Whether connections go through a PgBouncer that pools transactions.
        prepares: Whether statements are prepared once per connection. Behind PgBouncer that takes
            version 1.21, which prepares them on each connection of the server.
        listen_hosts: Hosts of the server behind PgBouncer, to which waiting calls connect directly
            to be notified; empty: they are not notified.
        shown: The URL without passwords.
    """

    dsn: str = field(repr=False)
    hosts: tuple[tuple[str, int | None], ...]
    kinds: tuple[str | None, ...]
    connect_seconds: float | None
    frozen_seconds: float
    settings: Mapping[str, str]
    direct_tls: bool
    through_pgbouncer: bool
    prepares: bool
    listen_hosts: tuple[tuple[str, int | None], ...]
    shown: str

    @classmethod
    def of(cls, url: str | URL) -> Self:
        """Parse a URL.

        Raises:
            InvalidURLError: A part, or a variable of libpq, is invalid. The error shows no value
                that may be a password.
        """
        text = as_text(url)
        if "%00" in text:
            raise _refused("no NUL character", "one, as %00")
        parts = _split(text)
        login, at, addresses = parts.netloc.rpartition("@")
        # Before the parameters: without an @, they may be the rest of a password.
        hosts = _hosts(unquote(address) for address in addresses.split(","))
        given = _parameters(parts.query)
        shown_query = {name: value for name, value in given.items() if name not in _SECRETS}
        given = {**_from_environment(given), **given}
        ports = given.pop("port", "")
        if others := _hosts(given.pop("host", "").split(",")):
            if hosts:
                raise _refused("hosts only once", "a host and the parameter 'host'")
            hosts = others
        field = "url"
        if not hosts:
            hosts = _hosts(os.environ.get("PGHOST", "").split(","), "PGHOST")
        if not ports and not (hosts and all(port for _, port in hosts)):
            field, ports = "PGPORT", os.environ.get("PGPORT", "")
        kind = given.pop("target_session_attrs", None)
        connect_seconds, frozen_seconds = (
            float(given.pop(name, default)) for name, default in _TIMEOUTS.items()
        )
        settings = {name: given.pop(name) for name in _SESSION if name in given}
        more = ((name, os.environ.get(variable)) for variable, name in _SETTINGS.items())
        settings |= {name: value for name, value in more if value}
        direct_tls = given.pop("sslnegotiation", "postgres") == "direct"
        if direct_tls and (mode := given.get("sslmode", "prefer")) not in _TLS_MODES:
            where = "url" if "sslnegotiation" in shown_query else "PGSSLNEGOTIATION"
            modes = ", ".join(_TLS_MODES)
            raise InvalidURLError(where, f"direct only with an sslmode of {modes}", mode)
        for name in _UNSUPPORTED:
            given.pop(name, None)
        pgbouncer = given.pop("pgbouncer", "false")
        listen = given.pop("listen", "")
        if listen and pgbouncer == "false":
            raise _refused("the parameter 'listen' only with 'pgbouncer'", "one without it")
        # asyncpg takes an empty name for that of a database, and does not read PGDATABASE.
        path = parts.path if parts.path != "/" else ""
        user, _, password = login.partition(":")
        hidden = ":***" if password or _SECRETS & given.keys() else ""
        return cls(
            dsn=f"postgresql://{login}{at}{path}{_query(given)}",
            hosts=_with_ports(hosts, ports, field),
            kinds=("standby", "any") if kind == "prefer-standby" else (kind,),
            connect_seconds=connect_seconds or None,
            frozen_seconds=frozen_seconds,
            settings=settings,
            direct_tls=direct_tls,
            through_pgbouncer=pgbouncer != "false",
            prepares=pgbouncer != "true",
            listen_hosts=tuple(_hosts(listen.split(","))),
            shown=(
                f"postgresql://{user}{hidden}{at or (hidden and '@')}{addresses}{parts.path}"
                f"{_query(shown_query)}"
            ),
        )

    def source(self, reason: str) -> str:
        """Return the field of an error: the variable that set a parameter which a server refuses.

        Args:
            reason: The server's error, which names the parameter, unless it is one of the options.
        """
        for variable, name in (*_SETTINGS.items(), ("PGOPTIONS", "options")):
            value = self.settings.get(name)
            is_named = name == "options" or f'"{name}"' in reason.lower()
            if value and is_named and value == os.environ.get(variable):
                return variable
        return "url"

    def direct(self) -> PostgresqlURL:
        """Return the URL of the server behind PgBouncer."""
        return replace(self, hosts=self.listen_hosts, through_pgbouncer=False, prepares=True)


def _split(text: str) -> SplitResult:
    rest = text.partition("://")[2]
    parts = None
    with suppress(ValueError):  # its text would repeat the URL, also as a context
        parts = urlsplit(f"postgresql://{rest}")
    if parts is not None:
        # A password with one of these characters was split, and any part may belong to it.
        login, at, _ = parts.netloc.rpartition("@")
        if rest.count("@") == len(at) and not set("[]") & set(login) and not parts.fragment:
            return parts
    raise _refused(
        "@ : / ? # [ ] in a user, password or parameter to be percent-encoded (@ as %40)",
        "a URL in which one is not",
    )


def _parameters(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in _KNOWN:
            # After a password, the name may be the rest of it.
            hidden = _SECRETS & given.keys()
            shown = (
                "another (& in a password is %26)"
                if hidden
                else f"the parameter {name!r}; {meant(name, _KNOWN)}"
            )
            raise _refused("parameters of libpq that are supported", shown)
        if name in given:
            raise _refused("every parameter once", f"{name!r} twice")
        _check("url", name, value)
        given[name] = value
    return given


def _from_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq's variables set, except those in the URL."""
    found = {}
    for variable, text in os.environ.items():
        if variable.startswith("PG"):
            with suppress(UnicodeEncodeError):  # its text would show a password, also as a context
                text.encode()
                continue
            raise InvalidURLError(variable, "text that is valid UTF-8", "other bytes")
    for variable, name in _VARIABLES.items():
        if name not in given and (value := os.environ.get(variable)):
            _check(variable, name, value)
            found[name] = value
    return found


def _check(field: str, name: str, value: str) -> None:
    """Check a parameter of the URL, or a variable, which is then the `field` of an error."""
    subject = f"{name} to be " if field == "url" else ""
    if name in _CHOICES and value not in _CHOICES[name]:
        choices = ", ".join(_CHOICES[name])
        shown = f"another {name}" if field == "url" else repr(value)
        raise InvalidURLError(field, f"{subject}one of {choices}", shown)
    if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
        choices = " or ".join(_UNSUPPORTED[name]) or "absent"
        reason = "asyncpg, the driver, supports nothing else"
        raise InvalidURLError(field, f"{subject}{choices} ({reason})", repr(value))
    if name in _FILES and not Path(value).is_file():
        raise InvalidURLError(field, f"{subject}an existing file", repr(value))
    if name in _TIMEOUTS:
        seconds = -1.0
        with suppress(ValueError):
            seconds = float(value)
        if not 0 <= seconds < float("inf"):
            raise InvalidURLError(field, f"{name} in seconds, 0 for no limit", repr(value))


def _hosts(addresses: Iterable[str], field: str = "url") -> list[tuple[str, int | None]]:
    """Parse addresses into hosts and ports."""
    found = []
    listed = list(addresses)
    for address in listed:
        if address.startswith("/"):  # the folder of a socket
            host, port = address, ""
        elif address.startswith("["):
            host, _, port = address.removeprefix("[").partition("]")
            port = port.removeprefix(":")
        else:
            host, _, port = address.partition(":")
        if host:
            found.append((host, _port(port, field)))
        elif port or len(listed) > 1:
            raise InvalidURLError(field, "a host before every colon and comma", "none")
    return found


def _with_ports(
    hosts: list[tuple[str, int | None]], ports: str, field: str
) -> tuple[tuple[str, int | None], ...]:
    """Add ports of the parameter or the variable that is the `field` of an error."""
    listed = [_port(port, field) for port in ports.split(",")]
    if not hosts and ports and field == "url":
        raise _refused("a host for the parameter 'port'", "none")
    if len(listed) == 1:
        listed *= len(hosts)
    if len(listed) != len(hosts):
        shown = f"{len(listed)} for {len(hosts)} hosts"
        raise InvalidURLError(field, "one port, or one per host", shown)
    return tuple((host, port or other) for (host, port), other in zip(hosts, listed, strict=True))


def _port(text: str, field: str) -> int | None:
    if not text:
        return None
    # `int` refuses very long texts.
    if text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) < 65536:
        return int(text)
    if field == "url":
        # Not shown: in `postgresql://USER:PASSWORD/DATABASE` it is the password.
        raise _refused("HOST:PORT with a port from 1 to 65535", "something else after the colon")
    raise InvalidURLError(field, "ports from 1 to 65535", repr(text))


def _query(parameters: Mapping[str, str]) -> str:
    return f"?{urlencode(parameters, quote_via=quote, safe='/:,')}" if parameters else ""


def _refused(expected: str, actual: str) -> InvalidURLError:
    return InvalidURLError("url", expected, actual)
