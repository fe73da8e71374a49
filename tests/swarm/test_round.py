"""The round as a table: transcripts of whole rounds, and properties under any order of events."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.swarm import events as ev
from spesd.swarm.records import Offer, PartOffer
from spesd.swarm.round import TABLE, Phase, Round, RoundRules, UnexpectedEvent, quorum_reason

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def offer(peer: str, number: int, experts: str = "", tokens: int = 100) -> Offer:
    parts = ["shared", *(f"expert-{e}" for e in experts.split(",") if e)]
    return Offer(
        run_id="r",
        peer_id=peer,
        round=number,
        tokens=tokens,
        global_tokens=0,
        loss=None,
        parts=tuple(
            PartOffer(
                part=p,
                term=1,
                tokens=tokens,
                digest=f"{hash((peer, number, p)) % 16**64:064x}",
                size=8,
            )
            for p in parts
        ),
    )


def machine(quorum: float = 0.5) -> Round:
    rules = RoundRules(local_steps=10, quorum=quorum, deadline_s=30, gossip_fanout=0, n_experts=4)
    return Round("A", rules)


def told(commands: list[ev.Command]) -> str:
    words = []
    for command in commands:
        name = type(command).__name__
        if isinstance(command, ev.Fetch):
            name += f"({command.want.part} from {command.want.peer})"
        elif isinstance(command, ev.Merge):
            merged = " ".join(
                f"{p.part}{'=' if p.own_tokens is None else '+'}{''.join(w.peer for w in p.inputs)}"
                for p in command.parts
            )
            missed = "; ".join(command.missed)
            name += f"({merged or 'nothing'}{' | ' + missed if missed else ''})"
        elif isinstance(command, ev.Snapshot):
            name += f"({command.closed_by})"
        elif isinstance(command, ev.SetDeadline):
            name += f"({command.phase} {command.seconds:g}s)"
        elif isinstance(command, ev.Resync):
            name += f"({command.reason})"
        elif isinstance(command, ev.Train):
            go_on = ", go on" if command.go_on else ""
            name += f"(round {command.round}, {command.steps} steps{go_on})"
        elif isinstance(command, ev.AskOffers):
            name += f"({''.join(sorted(command.peers))})"
        words.append(name)
    return ", ".join(words) or "nothing"


class Player:
    """Plays the lines of a transcript into a machine."""

    def __init__(self) -> None:
        self.round, self.now = machine(), 0.0
        self.fetches: dict[str, ev.Fetch] = {}

    def play(self, line: str) -> str | None:
        word, *rest = line.split()
        if word == "quorum":
            self.round = machine(float(rest[0]))
            return None
        if word == "advance":
            self.now += float(rest[0])
            return None
        commands = self.round.handle(self.event(word, rest), self.now)
        for command in commands:
            if isinstance(command, ev.Fetch):
                self.fetches[f"{command.want.part}/{command.want.peer}"] = command
        return f"{self.round.phase}: {told(commands)}"

    def event(self, word: str, rest: list[str]) -> ev.Event:
        number = self.round.round
        if word == "synced":
            return ev.Synced(round=int(rest[0]))
        if word == "roster":
            here, done = rest[0], rest[1] if len(rest) > 1 else ""
            return ev.RosterSeen(
                round=number, participants=frozenset(here.replace("-", "")), done=frozenset(done)
            )
        if word == "offer":
            experts = rest[2] if len(rest) > 2 else ""
            return ev.OfferSeen(round=int(rest[1]), offer=offer(rest[0], int(rest[1]), experts))
        if word == "snapshot":
            return ev.SnapshotTaken(round=number, offer=offer("A", number, rest[0] if rest else ""))
        if word == "arrived":
            return ev.PartArrived(round=number, want=self.fetches[rest[0]].want)
        if word == "failed":
            return ev.FetchFailed(round=number, want=self.fetches[rest[0]].want, reason="refused")
        if word == "deadline":
            return ev.DeadlinePassed(round=number, phase=rest[0])
        if word == "interrupted":
            return ev.Interrupted(round=number, reason="trainer lost")
        simple = {"steps_done": ev.StepsDone, "merged": ev.MergeDone, "leave": ev.LeaveAsked}
        return simple[word](round=number)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_a_transcript_plays_as_written(path: Path) -> None:
    player, expected, actual = Player(), [], []
    for line in path.read_text().splitlines():
        if line.startswith(("#", "  ")) or not line.strip():
            if line.startswith("  "):
                expected.append(line.strip())
            continue
        answer = player.play(line)
        if answer is not None:
            actual.append(answer)
    assert actual == expected


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 8


def test_every_row_names_a_method_and_every_phase_may_leave() -> None:
    for (phase, event), name in TABLE.items():
        assert callable(getattr(Round, name)), (phase, event)
    assert all((phase, ev.LeaveAsked) in TABLE for phase in Phase)


def test_an_event_without_a_row_raises_with_the_story() -> None:
    m = machine()
    m.handle(ev.Synced(round=1), 0.0)
    with pytest.raises(UnexpectedEvent, match=r"MergeDone\(1\) has no row in TRAINING"):
        m.handle(ev.MergeDone(round=1), 1.0)


@pytest.mark.parametrize(
    ("quorum", "others", "others_done", "own", "closes"),
    [
        (0.5, 0, 0, True, True),
        (0.5, 0, 0, False, False),
        (0.5, 3, 1, True, True),
        (0.5, 3, 1, False, False),
        (0.5, 3, 2, False, True),
        (1.0, 3, 3, False, False),
        (1.0, 3, 3, True, True),
        (0.75, 3, 2, True, True),
        (0.75, 3, 2, False, False),
    ],
)
def test_a_round_closes_when_the_quorum_of_live_peers_is_done(
    quorum: float, others: int, others_done: int, own: bool, closes: bool
) -> None:
    reason = quorum_reason(quorum=quorum, others=others, others_done=others_done, own_done=own)
    assert bool(reason) is closes


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("roster"),
            st.sampled_from(["-", "B", "BC", "BCD"]),
            st.sampled_from(["", "B", "BC"]),
        ),
        st.tuples(
            st.just("offer"),
            st.sampled_from("BCD"),
            st.integers(0, 3),
            st.sampled_from(["1", "2,3"]),
        ),
        st.tuples(st.just("steps_done")),
        st.tuples(st.just("deadline"), st.sampled_from(["TRAINING", "EXCHANGING"])),
        st.tuples(st.just("fetch"), st.booleans()),
        st.tuples(st.just("answer")),
        st.tuples(st.just("interrupted")),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.sampled_from([0.5, 1.0]))
def test_any_order_of_events_keeps_the_invariants(steps: list[tuple], quorum: float) -> None:
    """Whatever comes in whatever order: no event without a row, no round that goes back, at most
    one merge a round, and nothing older overwrites something newer."""
    m, now, merged = machine(quorum), 0.0, set()
    pending: list[ev.Command] = []
    best = 0

    def take(event: ev.Event) -> None:
        nonlocal best
        for command in m.handle(event, now):
            if isinstance(command, ev.Merge):
                assert command.round not in merged
                merged.add(command.round)
                for part in command.parts:
                    assert (part.round, part.term) > m.versions.get(part.part, (-1, -1))
                    m.versions[part.part] = (part.round, part.term)
            pending.append(command)
        assert m.round >= best
        best = m.round

    take(ev.Synced(round=1))
    for word, *rest in steps:
        now += 0.5
        number = m.round
        if word == "roster":
            take(
                ev.RosterSeen(
                    round=number,
                    participants=frozenset(rest[0].replace("-", "")),
                    done=frozenset(rest[1]),
                )
            )
        elif word == "offer":
            at = max(number + rest[1] - 1, 0)
            take(ev.OfferSeen(round=at, offer=offer(rest[0], at, rest[2])))
        elif word == "steps_done" and m.phase in (Phase.TRAINING, Phase.OFFERING):
            take(ev.StepsDone(round=number))
        elif word == "deadline":
            take(ev.DeadlinePassed(round=number, phase=rest[0]))
        elif word == "interrupted":
            take(ev.Interrupted(round=number, reason="x"))
        elif word == "fetch" and any(isinstance(c, ev.Fetch) for c in pending):
            fetch = next(c for c in pending if isinstance(c, ev.Fetch))
            pending.remove(fetch)
            done = ev.PartArrived(round=fetch.round, want=fetch.want)
            lost = ev.FetchFailed(round=fetch.round, want=fetch.want, reason="x")
            take(done if rest[0] else lost)
        elif word == "answer":
            answered = [c for c in pending if not isinstance(c, ev.Fetch)]
            for command in answered:
                pending.remove(command)
                if isinstance(command, ev.Snapshot) and command.round == m.round:
                    take(
                        ev.SnapshotTaken(round=command.round, offer=offer("A", command.round, "0"))
                    )
                elif isinstance(command, ev.Merge) and command.round == m.round:
                    take(ev.MergeDone(round=command.round))
                elif isinstance(command, ev.Resync):
                    take(ev.Synced(round=m.round + 2))
