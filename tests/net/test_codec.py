"""Envelopes: what was signed comes back, and nothing else does."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.errors import ProtocolViolation
from spesd.net.codec import RunRecord, open_envelope, seal
from spesd.net.identity import Identity
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

ME = Identity.generate()
OTHER = Identity.generate()
RECORD = PeerRecord(
    run_id="r", peer_id=ME.peer_id, seq=3, time=1.0, expires=2.0, state=PeerState.TRAINING,
    round=7, done=True, loss=None, val_loss=2.5, claims=(Claim(expert=0, term=0, since=1.5),),
    addresses=("/ip4/1.2.3.4/tcp/5/p2p/x",), health=("the disk is full",),
)  # fmt: skip
OFFER = Offer(
    run_id="r", peer_id=ME.peer_id, round=7, tokens=5, global_tokens=9, loss=1.5,
    parts=(PartOffer(part="shared", term=0, tokens=5, digest="ab" * 32, size=10),),
)  # fmt: skip
STATE = StateManifest(
    run_id="r", peer_id=ME.peer_id, round=6, global_tokens=9, contributors=2,
    parts=(StatePart(part="expert-3", round=5, term=2, digest="cd" * 32, size=1),),
)  # fmt: skip
RUN = RunRecord(run_id="0" * 32, peer_id=ME.peer_id, name="my run", expires=9.0)
SEALED = seal(RECORD, ME)


@pytest.mark.parametrize(
    "record", [RECORD, OFFER, STATE, RUN], ids=["peer", "offer", "state", "run"]
)
def test_every_kind_comes_back_as_it_was(record: object) -> None:
    assert open_envelope(seal(record, ME)) == record  # type: ignore[arg-type]


def test_a_statement_about_another_peer_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="another peer"):
        open_envelope(seal(RECORD, OTHER))


def test_a_signature_holds_for_its_kind_and_payload_alone() -> None:
    envelope = pb.SignedEnvelope.FromString(SEALED)
    for change in (
        {"kind": "run"},
        {"payload": envelope.payload + b"\x10\x04"},
        {"signature": b"x"},
    ):
        forged = pb.SignedEnvelope.FromString(SEALED)
        for name, value in change.items():
            setattr(forged, name, value)
        with pytest.raises(ProtocolViolation):
            open_envelope(forged.SerializeToString())


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_s": float("nan")}, {"loss": float("inf")}, {"round": 2**63},
        {"addresses": ["x"] * 9}, {"health": ["x" * 300]}, {"state": "DANCING"},
        {"claims": [pb.Claim(expert=1), pb.Claim(expert=1)]}, {"claims": [pb.Claim(expert=5000)]},
    ],
    ids=str,
)  # fmt: skip
def test_signed_nonsense_is_refused(change: dict) -> None:
    payload = pb.PeerRecord.FromString(pb.SignedEnvelope.FromString(SEALED).payload)
    for name, value in change.items():
        if isinstance(value, list):
            payload.ClearField(name)
            getattr(payload, name).extend(value)
        else:
            setattr(payload, name, value)
    raw = payload.SerializeToString()
    signature = ME.sign(b"spesd-v1:peer:" + raw)
    envelope = pb.SignedEnvelope(
        kind="peer", payload=raw, public_key=ME.public_key, signature=signature
    )
    with pytest.raises(ProtocolViolation):
        open_envelope(envelope.SerializeToString())


def test_oversize_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ProtocolViolation, match="bytes"):
        open_envelope(b"\x00" * 600_000)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_a_violation_and_nothing_worse(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        open_envelope(raw)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_a_changed_byte_is_a_violation_or_changes_nothing(at: int, by: int) -> None:
    raw = SEALED[:at] + bytes([SEALED[at] ^ by]) + SEALED[at + 1 :]
    with contextlib.suppress(ProtocolViolation):
        assert open_envelope(raw) == RECORD


FULL = [seal(r, ME) for r in (RECORD, OFFER, STATE, RUN)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FULL), st.data())
def test_a_mangled_envelope_is_a_violation_or_changes_nothing(
    raw: bytes, data: st.DataObject
) -> None:
    mangled = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(mangled) - 1, 0)))
        until = at + data.draw(st.integers(0, 40))
        mangled[at:until] = data.draw(st.binary(max_size=40))
    with contextlib.suppress(ProtocolViolation):
        assert open_envelope(bytes(mangled)) == open_envelope(raw)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["peer", "offer", "state", "run"]), st.binary(max_size=200))
def test_any_payload_signed_by_a_peer_is_a_violation_or_a_record(kind: str, payload: bytes) -> None:
    envelope = pb.SignedEnvelope(
        kind=kind, payload=payload, public_key=ME.public_key,
        signature=ME.sign(b"spesd-v1:" + kind.encode() + b":" + payload),
    )  # fmt: skip
    with pytest.raises(ProtocolViolation):  # no payload without our peer id passes
        open_envelope(envelope.SerializeToString())


def test_a_run_record_without_an_end_is_refused() -> None:
    for expires in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="no time"):
            seal(RunRecord(run_id="0" * 32, peer_id=ME.peer_id, name="n", expires=expires), ME)
