"""Records to bytes and back, signed: every size limit of a message is in this file.

What `open_envelope` returns has the right size, a valid signature by the peer that it names, and
passes its own `check()`. Everything else raises ProtocolViolation. Never touches a socket.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from spesd.errors import ProtocolViolation
from spesd.net.identity import Identity, peer_id_of, verify
from spesd.net.pb.spesd.v1 import records_pb2 as pb
from spesd.swarm.records import (
    Claim,
    Offer,
    PartOffer,
    PeerRecord,
    PeerState,
    StateManifest,
    StatePart,
)

MAX_RECORD_BYTES = 192 * 1024  # a peer record that claims 4096 experts; usual ones have 1-2 KiB
MAX_MANIFEST_BYTES = 512 * 1024  # an offer or a state of 4096 experts
MAX_CONFIG_BYTES = 64 * 1024
MAX_ENVELOPES = 1024  # in one message
MAX_MESSAGE_BYTES = 900 * 1024  # of envelopes in one message; p2pd's own limit is 4 MB
MAX_REQUEST_BYTES = 1024  # of a request for chunks
MAX_CHUNK_REPLY_BYTES = 256 * 1024 + 64  # a chunk, or a piece of a chunk list, and its frame
MAX_KEY_AND_SIGNATURE_BYTES = 2048  # what an envelope may have besides its payload
MAX_CLOCK = 2.0**40  # seconds since the epoch
_DOMAIN = b"spesd-v1:"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """ "There is a run of this name": said by each of its peers."""

    run_id: str
    peer_id: str
    name: str
    expires: float  # seconds since the epoch, DHT time

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        check_time("run.expires", self.expires)
        hexadecimal = all(c in "0123456789abcdef" for c in self.run_id)
        if len(self.run_id) != 32 or not hexadecimal:
            raise ProtocolViolation("a run id is not 32 hex digits")
        if not 0 < len(self.name) <= 64 or not self.name.isprintable():
            raise ProtocolViolation("a run's name is not a printable text of 1 to 64 characters")


Record = PeerRecord | Offer | StateManifest | RunRecord

_KINDS: dict[str, tuple[type[Record], type[Message], int]] = {
    "peer": (PeerRecord, pb.PeerRecord, MAX_RECORD_BYTES),
    "offer": (Offer, pb.Offer, MAX_MANIFEST_BYTES),
    "state": (StateManifest, pb.StateManifest, MAX_MANIFEST_BYTES),
    "run": (RunRecord, pb.RunRecord, MAX_RECORD_BYTES),
}


def run_id_of(config: bytes) -> str:
    """Return the id of the run whose canonical config this is."""
    return hashlib.sha256(config).hexdigest()[:32]


def check_time(name: str, seconds: float) -> None:
    """Raise ProtocolViolation unless this is a time that a clock may show."""
    if not 0.0 <= seconds <= MAX_CLOCK:  # nor is a NaN
        raise ProtocolViolation(f"{name} is {seconds}, which is no time")


def seal(record: Record, identity: Identity) -> bytes:
    """Return the signed envelope of a record of ours.

    Raises ValueError if it breaks a rule that others would refuse it for: our own bug.
    """
    kind = next(k for k, (of, _, _) in _KINDS.items() if isinstance(record, of))
    try:
        record.check()
    except ProtocolViolation as error:
        raise ValueError(f"our own record is not valid: {error}") from None
    payload = _to_message(record).SerializeToString(deterministic=True)
    if len(payload) > _KINDS[kind][2]:
        raise ValueError(f"our own {kind} record has {len(payload)} bytes")
    envelope = pb.SignedEnvelope(
        kind=kind,
        payload=payload,
        public_key=identity.public_key,
        signature=identity.sign(_DOMAIN + kind.encode() + b":" + payload),
    )
    return bytes(envelope.SerializeToString(deterministic=True))


def open_envelope(raw: bytes) -> Record:
    """Return the record in a signed envelope, verified; raises ProtocolViolation otherwise."""
    if len(raw) > MAX_MANIFEST_BYTES + MAX_KEY_AND_SIGNATURE_BYTES:
        raise ProtocolViolation(f"an envelope has {len(raw)} bytes")
    envelope = _parse(pb.SignedEnvelope, raw)
    if envelope.kind not in _KINDS:
        raise ProtocolViolation("an envelope is of no known kind")
    _, message_kind, limit = _KINDS[envelope.kind]
    if len(envelope.payload) > limit:
        raise ProtocolViolation(f"a {envelope.kind} record has {len(envelope.payload)} bytes")
    signed = _DOMAIN + envelope.kind.encode() + b":" + envelope.payload
    verify(envelope.public_key, signed, envelope.signature)
    record = _from_message(_parse(message_kind, envelope.payload))
    if record.peer_id != peer_id_of(envelope.public_key):
        raise ProtocolViolation("a record names another peer than the one that signed it")
    record.check()
    return record


def _parse(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise ProtocolViolation("a message cannot be decoded") from None


def _to_message(record: Record) -> Message:
    if isinstance(record, PeerRecord):
        claims = [pb.Claim(expert=c.expert, term=c.term, since=c.since) for c in record.claims]
        values = {**vars(record), "claims": claims, "state": str(record.state)}
        return pb.PeerRecord(**{k: v for k, v in values.items() if v is not None})
    if isinstance(record, Offer):
        parts = [
            pb.PartOffer(**{**vars(p), "digest": bytes.fromhex(p.digest)}) for p in record.parts
        ]
        values = {**vars(record), "parts": parts}
        return pb.Offer(**{k: v for k, v in values.items() if v is not None})
    if isinstance(record, StateManifest):
        held = [
            pb.StatePart(**{**vars(p), "digest": bytes.fromhex(p.digest)}) for p in record.parts
        ]
        return pb.StateManifest(**{**vars(record), "parts": held})
    return pb.RunRecord(**vars(record))


def _from_message(message: Any) -> Record:
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    for name in ("loss", "val_loss"):
        if name in values and not message.HasField(name):
            values[name] = None
    if isinstance(message, pb.PeerRecord):
        try:
            values["state"] = PeerState(message.state)
        except ValueError:
            raise ProtocolViolation("a record is in no known state") from None
        values["claims"] = tuple(
            Claim(expert=c.expert, term=c.term, since=c.since) for c in message.claims
        )
        values["addresses"] = tuple(message.addresses)
        values["health"] = tuple(message.health)
        return PeerRecord(**values)
    if isinstance(message, pb.Offer):
        values["parts"] = tuple(
            PartOffer(part=p.part, term=p.term, tokens=p.tokens, digest=p.digest.hex(), size=p.size)
            for p in message.parts
        )
        return Offer(**values)
    if isinstance(message, pb.StateManifest):
        values["parts"] = tuple(
            StatePart(part=p.part, round=p.round, term=p.term, digest=p.digest.hex(), size=p.size)
            for p in message.parts
        )
        return StateManifest(**values)
    return RunRecord(**values)
