"""Multiaddrs: which are well formed, which are dialable by whom, best first."""

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from hivemind.utils.multiaddr import Multiaddr

from spesd.errors import Unavailable, UsageError

KINDS = ("public", "private", "loopback")


def checked(address: str, *, with_peer: bool) -> str:
    """Return a multiaddr in its normal form; UsageError that shows the right form otherwise."""
    example = "/ip4/203.0.113.7/tcp/4001" + ("/p2p/QmPeerId" if with_peer else "")
    try:
        parsed = Multiaddr(address)
        protocols = [p.name for p in parsed.protocols()]
    except Exception:  # noqa: BLE001 - the parser raises what it likes
        protocols = []
    complete = bool(protocols) and ("tcp" in protocols or "udp" in protocols)
    if not complete or (with_peer and protocols[-1] != "p2p"):
        raise UsageError(f"{address!r} is not an address of a peer; it looks like {example}.")
    return str(parsed)


def port_of(address: str) -> int:
    """Return the TCP or UDP port of a multiaddr; 0 if it has none."""
    words = address.split("/")
    for name in ("tcp", "udp"):
        if name in words:
            return int(words[words.index(name) + 1])
    return 0


def check_port(address: str) -> None:
    """Refuse a port that is taken: p2pd binds with SO_REUSEPORT and would share it in silence."""
    words, port = address.split("/"), port_of(address)
    if port == 0 or words[1] not in ("ip4", "ip6") or "tcp" not in words:
        return
    family = socket.AF_INET6 if words[1] == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((words[2], port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(
                    f"the port {port} is in use; choose another one with --listen, or end what "
                    "uses it."
                ) from None


def kind_of(address: str) -> str:
    """Tell who can dial this address: public, private or loopback."""
    words = address.split("/")
    if len(words) < 3 or words[1] not in ("ip4", "ip6"):
        return "public"  # a DNS name: somebody chose it
    ip = ipaddress.ip_address(words[2])
    if ip.is_loopback:
        return "loopback"
    return "public" if ip.is_global else "private"


def best_first(addresses: Iterable[str]) -> list[str]:
    """Sort addresses by who can dial them, IPv4 before IPv6; link-local ones are left out."""
    usable = [a for a in addresses if not _link_local(a) and "/p2p-circuit" not in a]
    return sorted(dict.fromkeys(usable), key=lambda a: (KINDS.index(kind_of(a)), "/ip6/" in a, a))


def _link_local(address: str) -> bool:
    words = address.split("/")
    return (
        len(words) > 2
        and words[1] in ("ip4", "ip6")
        and ipaddress.ip_address(words[2]).is_link_local
    )


def without_ip6(listen: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses but for IPv6 ones, for a host that has none."""
    return tuple(a for a in listen if not a.startswith("/ip6/")) or tuple(listen)


def start_failure(text: str, listen: Sequence[str]) -> Unavailable:
    """Turn what p2pd said when it did not start into a sentence."""
    ports = ", ".join(str(port_of(a)) for a in listen)
    if "in use" in text or "failed to listen" in text:
        return Unavailable(
            f"the port {ports} is in use; choose another one with --listen, or end what uses it."
        )
    return Unavailable(f"the network daemon did not start: {text[:200]}.")
