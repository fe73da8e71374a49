"""The trainer: plain training when alone, the paper's aggregation together, exact resume."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain import plain_loop
from helpers.tiny import make_trainer, tiny_config
from safetensors.torch import load_file

from spesd.checkpoint.bundle import write_bundle
from spesd.errors import DamagedState, ProtocolViolation
from spesd.memory import Layout
from spesd.swarm.plan import merges, trained_parts, wants
from spesd.swarm.records import Offer, PartOffer
from spesd.train.trainer import Trainer, TrainerSetup

ALL = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().float().clone() for n, p in trainer.model.named_parameters()}


def test_a_swarm_of_one_is_plain_training_bit_for_bit(tmp_path: Path) -> None:
    config = tiny_config()
    trainer = make_trainer(config, tmp_path, "a", ALL)
    tokens = 0
    for number in (1, 2, 3):
        trainer.begin_round(number, tokens, 1)
        for _ in range(5):
            tokens += trainer.step().tokens
        offered, refused = trainer.snapshot()
        assert len(offered) == 5 and refused == []
        assert trainer.merge(number, [])["merged"] == []
        trainer.evaluate()
        trainer.checkpoint(number, tokens, 1, {})
    expected = plain_loop(config, "a", 15)
    for name, value in weights(trainer).items():
        assert torch.equal(value, expected[name]), name


def offers_of(trainers: dict[str, Trainer], number: int) -> dict[str, Offer]:
    offers = {}
    for peer, trainer in trainers.items():
        parts = tuple(
            PartOffer(
                part=p["part"], term=1, tokens=p["tokens"], digest=p["digest"], size=p["size"]
            )
            for p in trainer.snapshot()[0]
        )
        offers[peer] = Offer(
            run_id="r",
            peer_id=peer,
            round=number,
            tokens=1,
            global_tokens=0,
            loss=None,
            parts=parts,
        )
    return offers


def exchange(trainers: dict[str, Trainer], offers: dict[str, Offer], number: int) -> None:
    """What the daemon does between a snapshot and the next round, with everybody present."""
    for peer, trainer in trainers.items():
        needed = wants(peer, trained_parts(trainer.model.owned), offers, 0)
        plan = []
        for merge in merges(offers[peer], needed, 4, {}):
            inputs = [
                {"path": str(trainers[w.peer].bundle(w.digest)), "digest": w.digest,
                 "tokens": w.tokens, "peer": w.peer}
                for w in merge.inputs
            ]  # fmt: skip
            plan.append({"part": merge.part, "own_tokens": merge.own_tokens, "inputs": inputs})
        assert trainer.merge(number, plan)["rejected"] == []


@pytest.mark.parametrize("owned", [((0,), (1,), (2,), (3,)), ((0, 1), (1, 2), (2, 3), (3, 0))])
def test_four_peers_come_to_the_reference_aggregation(
    owned: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    config = tiny_config()
    names = ("a", "b", "c", "d")
    trainers = {
        n: make_trainer(config, tmp_path / n, n, o) for n, o in zip(names, owned, strict=True)
    }
    for number in (1, 2):
        for trainer in trainers.values():
            trainer.begin_round(number, 0, 4)
            for _ in range(3):
                trainer.step()
        offers = offers_of(trainers, number)
        expected = reference(trainers, offers)
        exchange(trainers, offers, number)
        for trainer in trainers.values():
            for name, value in weights(trainer).items():
                assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7), name


def reference(trainers: dict[str, Trainer], offers: dict[str, Offer]) -> dict[str, torch.Tensor]:
    """Experts from their owners, shared parameters averaged, by tokens; from the files alone."""
    sums: dict[str, torch.Tensor] = {}
    totals: dict[str, float] = {}
    for peer, offer in offers.items():
        for part in offer.parts:
            for name, tensor in load_file(trainers[peer].bundle(part.digest)).items():
                sums[name] = sums.get(name, 0) + tensor.double() * part.tokens
                totals[name] = totals.get(name, 0) + part.tokens
    return {n: (s / totals[n]).float() for n, s in sums.items()}


def test_resuming_from_a_checkpoint_is_exact(tmp_path: Path) -> None:
    config = tiny_config()
    straight = make_trainer(config, tmp_path / "a", "a", (0, 2))
    for _ in range(4):
        straight.step()
    path = straight.checkpoint(1, 512, 1, {"shared": (1, 0)})
    for _ in range(4):
        straight.step()
    resumed = Trainer(straight.setup)
    checkpoint = resumed.store.read(path)
    resumed.load_checkpoint(checkpoint)
    resumed.step_in_round = 4
    assert (resumed.steps, resumed.tokens) == (4, 4 * 128)
    for _ in range(4):
        resumed.step()
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_a_bad_input_is_left_out_and_named(tmp_path: Path) -> None:
    config = tiny_config()
    a = make_trainer(config, tmp_path / "a", "a", (0, 1))
    b = make_trainer(config, tmp_path / "b", "b", (2, 3))
    b.step()
    offered = {p["part"]: p for p in b.snapshot()[0]}
    a.step()
    a.snapshot()
    good, bad = offered["expert-2"], offered["expert-3"]
    damaged = b.bundle(bad["digest"])
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    before = weights(a)
    plan = [
        {"part": p["part"], "own_tokens": None,
         "inputs": [{"path": str(b.bundle(p["digest"])), "digest": p["digest"],
                     "tokens": 1, "peer": "b"}]}
        for p in (good, bad)
    ]  # fmt: skip
    result = a.merge(1, plan)
    assert result["merged"] == ["expert-2"]
    assert [(r["peer"], r["part"]) for r in result["rejected"]] == [("b", "expert-3")]
    assert torch.equal(weights(a)["layers.0.experts.3.w1"], before["layers.0.experts.3.w1"])
    assert torch.equal(weights(a)["layers.0.experts.2.w1"], weights(b)["layers.0.experts.2.w1"])


def test_a_step_that_is_not_finite_changes_nothing_and_a_bad_part_is_not_offered(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tiny_config(), tmp_path, "a", ALL)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name.endswith("experts.1.w2"):
                parameter.fill_(float("nan"))
    before = weights(trainer)
    result = trainer.step()
    assert result.loss is None and "not finite" in result.reason
    assert torch.equal(weights(trainer)["embed.weight"], before["embed.weight"])
    offered, refused = trainer.snapshot()
    assert "expert-1" not in [p["part"] for p in offered]
    assert refused and refused[0].startswith("expert-1")


def test_a_state_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    a = make_trainer(tiny_config(), tmp_path / "a", "a", ALL)
    a.step()
    parts = a.store.read(a.checkpoint(1, 1, 1, {})).parts
    given = [{"part": p.part, "path": str(a.bundle(p.digest)), "digest": p.digest} for p in parts]
    b = make_trainer(tiny_config(), tmp_path / "b", "b", (0,))
    before = weights(b)
    with pytest.raises(ProtocolViolation, match="lacks"):
        b.load_state(given[:-1])
    last = a.bundle(parts[-1].digest)
    raw = last.read_bytes()
    last.write_bytes(raw[:-1])
    with pytest.raises(DamagedState):
        b.load_state(given)
    assert all(torch.equal(v, before[n]) for n, v in weights(b).items())
    last.write_bytes(raw)
    b.load_state(given)
    assert all(torch.equal(v, weights(a)[n]) for n, v in weights(b).items())


def test_frozen_experts_do_not_train(tmp_path: Path) -> None:
    config = tiny_config()
    trainer = make_trainer(config, tmp_path, "a", (0,))
    before = weights(trainer)
    trainer.step()
    after = weights(trainer)
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert not any(f"experts.{e}." in n for n in moved for e in (1, 2, 3))
    assert any("experts.0." in n for n in moved) and "embed.weight" in moved


def test_what_is_owned_keeps_its_precision_through_a_restart(tmp_path: Path) -> None:
    """A restarted trainer owns nothing yet, and frozen experts are held in bf16."""
    setup = TrainerSetup(
        config=tiny_config(),
        peer_id="a",
        store=tmp_path,
        owned=(1,),
        layout=Layout(k=1, rows=0, frozen="bf16"),
    )
    first = Trainer(setup)
    first.initialise()
    first.step()
    path = first.checkpoint(1, 0, 1, {})
    again = Trainer(dataclasses.replace(setup, owned=()))
    again.load_checkpoint(again.store.read(path))
    assert again.model.owned == {1}
    for name, value in weights(first).items():
        assert torch.equal(value, weights(again)[name]), name


def adopted(part: str, own_tokens: int | None, folder: Path, made: dict[str, Any]) -> list[Any]:
    """A plan for one part, from what each peer made of it, one token each."""
    inputs = []
    for peer, tensors in made.items():
        digest, _ = write_bundle(folder, tensors)
        path = folder / f"{digest}.safetensors"
        inputs.append({"path": str(path), "digest": digest, "tokens": 1, "peer": peer})
    return [{"part": part, "own_tokens": own_tokens, "inputs": inputs}]


@pytest.mark.parametrize("own_tokens", [None, 1])
def test_finite_values_that_average_to_infinity_never_reach_the_weights(
    own_tokens: int | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_config(), tmp_path, "a", ALL)
    trainer.step()
    trainer.snapshot()
    before = weights(trainer)
    shapes = trainer.shapes["expert-1"]
    made = {
        peer: {n: torch.full(s, value) for n, s in shapes.items()}
        for peer, value in (("b", 3e38), ("c", -3e38))
    }
    result = trainer.merge(1, adopted("expert-1", own_tokens, tmp_path / "in", made))
    assert [r["peer"] for r in result["rejected"]] == ["b", "c"] and result["merged"] == []
    assert all(torch.equal(v, before[n]) for n, v in weights(trainer).items())


def test_one_bad_input_leaves_the_average_of_the_others(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(), tmp_path, "a", (0,))
    shapes = trainer.shapes["expert-2"]
    made = {
        peer: {n: torch.full(s, value) for n, s in shapes.items()}
        for peer, value in (("b", 1.0), ("c", float("nan")), ("d", 3.0))
    }
    result = trainer.merge(1, adopted("expert-2", None, tmp_path / "in", made))
    assert [r["peer"] for r in result["rejected"]] == ["c"] and result["merged"] == ["expert-2"]
    assert bool((weights(trainer)["layers.0.experts.2.w1"] == 2.0).all())


def test_co_owners_draw_experts_equally_however_many_steps_each_made(tmp_path: Path) -> None:
    merging = {"interval_rounds": 1, "alpha": 0.5, "decay_tokens": 2_000, "donors": 2}
    config = tiny_config(merging=merging)
    made = []
    for steps in (1, 5):
        trainer = make_trainer(config, tmp_path / str(steps), "a", ALL)
        trainer.begin_round(1, 500, 2)
        trainer.step_in_round = steps  # weights are equal: only the count of steps differs
        trainer.merge(1, [])
        made.append(weights(trainer))
    initial = weights(make_trainer(config, tmp_path / "i", "a", ALL))
    assert any(not torch.equal(v, initial[n]) for n, v in made[0].items())
    assert all(torch.equal(v, made[1][n]) for n, v in made[0].items())


def gradients_after(tmp_path: Path, layout: Layout) -> tuple[float | None, dict[str, torch.Tensor]]:
    setup = TrainerSetup(
        config=tiny_config(loss={"load_balance": 0.0, "router_z": 0.0}),
        peer_id="a",
        store=tmp_path,
        owned=(0, 1),
        layout=layout,
    )
    trainer = Trainer(setup)
    trainer.initialise()
    loss = trainer.step().loss
    return loss, weights(trainer)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_add_up_to_the_batch(tmp_path: Path, rows: int) -> None:
    whole_loss, whole = gradients_after(tmp_path, Layout(k=2, rows=0, frozen="fp32"))
    loss, pieced = gradients_after(tmp_path, Layout(k=2, rows=rows, frozen="fp32"))
    assert whole_loss is not None and loss == pytest.approx(whole_loss, rel=1e-5)
    for name, values in whole.items():
        # Adam's first step is lr times the gradient's sign: most must agree but for rounding
        torch.testing.assert_close(pieced[name], values, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("recompute", ["experts", "layers"])
def test_recomputing_trains_to_the_same_bits(tmp_path: Path, recompute: Any) -> None:
    _, kept = gradients_after(tmp_path, Layout(k=2, rows=0, frozen="fp32"))
    layout = Layout(k=2, rows=0, frozen="fp32", recompute=recompute)
    _, recomputed = gradients_after(tmp_path, layout)
    for name, values in kept.items():
        assert torch.equal(recomputed[name], values), name


@pytest.mark.parametrize("changes", [{"frozen": "int8"}, {"half": True}, {"moments8": True}])
def test_every_layout_learns_as_the_plain_one_does(tmp_path: Path, changes: Any) -> None:
    losses = {}
    for name, layout in {
        "plain": Layout(k=2, rows=0, frozen="fp32"),
        "other": Layout(**({"k": 2, "rows": 0, "frozen": "fp32"} | changes)),
    }.items():
        setup = TrainerSetup(
            config=tiny_config(), peer_id="a", store=tmp_path, owned=(0, 1), layout=layout
        )
        trainer = Trainer(setup)
        trainer.initialise()
        trainer.begin_round(1, 0, 1)
        for _ in range(40):
            trainer.step()
        losses[name] = trainer.evaluate()
    assert losses["plain"] < 4.5  # from 5.6
    assert losses["other"] == pytest.approx(losses["plain"], abs=0.05)


def test_own_experts_count_less_in_the_balance_at_first(tmp_path: Path) -> None:
    """SPES, decayed balance loss: what is charged less gets more of the peer's tokens."""
    routed = {}
    for name, factor in (("plain", 1.0), ("favoured", 0.0)):
        loss = {"load_balance": 1.0, "owned_balance": factor, "owned_balance_tokens": 10**9}
        config = tiny_config(loss=loss, optimizer={"lr": 1e-2})
        trainer = make_trainer(config, tmp_path / name, "a", (0, 1))
        trainer.begin_round(1, 0, 1)
        for _ in range(40):
            trainer.step()
        trainer.begin_round(2, 0, 1)
        for _ in range(5):
            trainer.step()
        routed[name] = trainer._trained["expert-0"] + trainer._trained["expert-1"]
    assert routed["favoured"] > 1.2 * routed["plain"]


def test_two_peers_with_the_same_inputs_merge_to_identical_bytes(tmp_path: Path) -> None:
    config = tiny_config(merging={"interval_rounds": 1, "alpha": 0.3, "decay_tokens": 10_000})
    digests = []
    for name in ("a", "b"):
        trainer = make_trainer(config, tmp_path / name, name, (1, 2))
        before = weights(trainer)
        trainer.begin_round(1, 5_000, 1)
        reply = trainer.merge(1, [])
        assert [sorted(layer) for layer in reply["draws"]] == [["1", "2"], ["1", "2"]]
        changed = {n for n, v in weights(trainer).items() if not torch.equal(v, before[n])}
        assert changed and all(".experts.1." in n or ".experts.2." in n for n in changed)
        digests.append({p["part"]: p["digest"] for p in trainer.snapshot()[0]})
    assert digests[0] == digests[1]


def test_the_held_out_loss_of_each_source_and_their_weighted_mean(tmp_path: Path) -> None:
    texts = tmp_path / "digits.jsonl"
    texts.write_text("".join(f'{{"text": "{n:040d}"}}\n' for n in range(400)))
    sources = [
        {"name": "plays", "weight": 3.0},
        {"kind": "jsonl", "path": str(texts), "name": "digits", "weight": 1.0},
    ]
    config = tiny_config(data={"sources": sources, "eval_batches": 3})
    trainer = make_trainer(config, tmp_path / "a", "a", ALL)
    other = make_trainer(config, tmp_path / "b", "b", ALL)
    assert trainer.evaluate() == other.evaluate()
    for _ in range(20):
        trainer.step()
    mean = trainer.evaluate()
    losses = trainer.val_by_source
    assert list(losses) == ["plays", "digits"]
    assert losses["plays"] < losses["digits"] - 0.2  # most tokens of the mixture are of plays
    assert mean == pytest.approx(0.75 * losses["plays"] + 0.25 * losses["digits"], rel=1e-12)
    batches = trainer.stream.held_out_by_source(3)
    assert {name: len(found) for name, found in batches.items()} == {"plays": 2, "digits": 1}


def test_with_one_source_the_held_out_loss_is_the_mean_of_its_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(data={"eval_batches": 3}), tmp_path, "a", ALL)
    each = []
    with torch.no_grad():
        for batch in trainer.stream.held_out_batches(3):
            inputs, targets = (torch.from_numpy(a) for a in batch)
            out = trainer.model.loss(inputs, targets, trainer.config.loss)
            each.append(float(out.cross_entropy))
    assert len(each) == 3
    assert trainer.evaluate() == sum(each) / 3  # to the last bit
    assert trainer.val_by_source == {"builtin": sum(each) / 3}
