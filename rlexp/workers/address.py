"""Where the server listens, as `algo.source.address` says it: host:port, [IPv6]:port, or unix:<path>; and its TLS keys."""

import contextlib
import re
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from rlexp.config import ConfigError

_LONGEST = 107  # bytes of a unix socket's path
_NOT_IN_PATHS = (
    "#?,%\0"  # in gRPC's eyes the address is a URI, or a list of them, and one end reads it otherwise than the other
)
_EVERYWHERE = ("0.0.0.0", "::")


class Tls(NamedTuple):
    """Files of PEM."""

    certificate: Path
    key: Path
    authority: Path  # what workers trust


def check(text: str) -> None:
    """Raises ConfigError for what is no address."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > _LONGEST or set(path) & set(_NOT_IN_PATHS):
            raise ConfigError(
                f"algo.source.address: {text!r}: expected unix:/… with a path of at most {_LONGEST} bytes, none of them # ? , %"
            )
        return
    host, port = _parts(text)
    if not host or port is None or port > 65535:
        raise ConfigError(
            f"algo.source.address: {text!r} is none; allowed: host:port, with port 0 for any free one, or unix:/path"
        )


def check_here(text: str) -> None:
    """Raises ConfigError where this machine cannot listen there now."""
    try:
        if text.startswith("unix:"):
            _check_path(Path(text.removeprefix("unix:")))
            return
        host, port = _parts(text)
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(place)
            one.listen()
    except (OSError, UnicodeError) as error:  # a name with labels that are none is no error of the system's
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"algo.source.address: it is not possible to listen on {text!r} ({why})") from error


def reached_at(text: str, port: int) -> str:
    """Where workers reach a server that listens there, and was given this port."""
    if text.startswith("unix:"):
        return text
    host, _ = _parts(text)
    return f"{socket.gethostname() if host in _EVERYWHERE else _bracketed(host)}:{port}"


def free(text: str) -> None:
    """Removes what a server has left."""
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:"))
        with contextlib.suppress(OSError):
            if path.is_socket():
                path.unlink()


def check_tls(certificate: str | None, key: str | None, authority: str | None, listens: str) -> Tls | None:
    """None without TLS. `listens` is where the server does, as in `check`.

    Raises ConfigError for files that cannot be read or do not belong together, and for a certificate that workers would refuse.
    """
    if certificate is None and key is None and authority is None:
        return None
    for name, value in (("certificate", certificate), ("key", key)):
        if value is None:
            raise ConfigError(f"algo.source.tls_{name}: this key is missing: TLS needs tls_certificate and tls_key")
    assert certificate is not None and key is not None
    tls = Tls(Path(certificate), Path(key), Path(authority or certificate))
    for name, path in tls._asdict().items():
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"algo.source.tls_{name}: {str(path)!r} cannot be read ({error.strerror})") from error
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # gRPC trusts what it is given, a root or not
    try:
        server.load_cert_chain(tls.certificate, tls.key, password=lambda: b"")
    except ssl.SSLError as error:
        raise ConfigError(
            f"algo.source.tls_key: {key!r} is no key, without a password, of the certificate {certificate!r} "
            f"({error.reason or error})"
        ) from error
    try:
        client.load_verify_locations(tls.authority)
    except ssl.SSLError as error:
        raise ConfigError(
            f"algo.source.tls_authority: {authority!r} is no certificate ({error.reason or error})"
        ) from error
    if listens.startswith("unix:"):
        raise ConfigError(
            f"algo.source.tls_certificate: {certificate!r} is for host:port, and algo.source.address is {listens!r}, "
            "which stays on this machine and which no certificate can name; expected null"
        )
    host, _ = _parts(reached_at(listens, 0))
    try:
        _shake_hands(server, client, host)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason
        raise ConfigError(
            f"algo.source.tls_certificate: {certificate!r} would be refused by workers, which reach the server as {host!r} and "
            f"trust {str(tls.authority)!r}: {why}"
        ) from error
    return tls


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """In memory, as a worker that was told this host does. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there, server_hostname=host), server.wrap_bio(there, back, server_side=True)
    for _ in range(4):  # more turns than any version of TLS takes
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _check_path(path: Path) -> None:
    if path.exists():
        if not path.is_socket():
            raise OSError("there is something else")
        with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(ConnectionRefusedError):
            one.connect(str(path))
            raise OSError("somebody listens there")
        return
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    path.unlink()


def _parts(text: str) -> tuple[str, int | None]:
    """(host without brackets, port)."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\s/\[\]]+)):([0-9]{1,5})", text)
    return (found[1] or found[2], int(found[3])) if found else ("", None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
