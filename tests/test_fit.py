"""The layout a peer gets: the fastest that owns enough, or the one that owns most."""

from dataclasses import replace

from spesd.config import ModelConfig, RunConfig
from spesd.configtree import from_tree
from spesd.fit import choose, computes_in_half, layouts, memory_plan
from spesd.peerconfig import PeerConfig

RUN = from_tree(
    RunConfig,
    {
        "model": {"vocab_size": 4096, "d_model": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4,
                  "head_dim": 64, "ffn": 512, "n_experts": 16},
        "data": {"seq_len": 256, "batch_size": 8},
    },
)  # fmt: skip
CPU = PeerConfig(device="cpu")
GPU = PeerConfig(device="cuda:0")


def peak(layout, peer=CPU):
    return memory_plan(RUN, layout, peer.device).peak


def test_with_room_for_all_nothing_is_traded_and_everything_owned():
    layout = choose(RUN, CPU, 10**12)
    assert (layout.k, layout.rows, layout.frozen, layout.recompute) == (16, 8, "bf16", "none")


def test_of_what_fits_no_more_than_wanted_is_owned():
    layout = choose(RUN, CPU, 10**12, wanted=3)
    assert layout.k == 3
    assert layout.recompute == "none"


def test_it_slows_down_only_as_far_as_a_quarter_of_the_experts_needs():
    """Every budget gets the first layout, in order of speed, with 4 of 16; else the most."""
    seen = set()
    for megabytes in range(200, 1000, 10):
        layout = choose(RUN, CPU, megabytes * 10**6)
        fits = [x for x in layouts(RUN, CPU) if peak(replace(x, k=4)) <= megabytes * 10**6]
        if layout is None:
            assert min(peak(x) for x in layouts(RUN, CPU)) > megabytes * 10**6
            continue
        assert peak(layout) <= megabytes * 10**6
        if fits:
            assert layout == replace(fits[0], k=layout.k) and layout.k >= 4
        else:
            assert layout.k < 4
        seen.add((layout.k < 4, layout.recompute, layout.frozen))
    assert {few for few, _, _ in seen} == {True, False} and len(seen) >= 4


def test_what_the_user_fixed_stays():
    peer = PeerConfig(device="cpu", frozen="fp32", recompute="experts", micro_batch=2)
    for layout in layouts(RUN, peer):
        assert (layout.frozen, layout.recompute, layout.rows) == ("fp32", "experts", 2)
    too_many = PeerConfig(device="cpu", micro_batch=100)
    assert {layout.rows for layout in layouts(RUN, too_many)} == {8}


def test_the_fastest_comes_first():
    order = layouts(RUN, CPU)
    assert (order[0].rows, order[0].frozen, order[0].recompute) == (8, "bf16", "none")
    assert (order[-1].rows, order[-1].frozen, order[-1].recompute) == (1, "int8", "layers")
    assert len({(x.rows, x.frozen, x.recompute) for x in order}) == 4 * 2 * 3


def test_a_gpu_computes_in_bf16_unless_told_otherwise():
    assert computes_in_half(GPU) and not computes_in_half(CPU)
    assert not computes_in_half(PeerConfig(device="cuda:0", precision="fp32"))
    assert computes_in_half(PeerConfig(device="cpu", precision="bf16"))


def test_the_models_of_the_paper_fit_where_it_says():
    """2B on 48 GB cards with a quarter of the experts; the 1B's quarter already on 12 GB."""
    shape = ModelConfig(
        vocab_size=151_665, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64,
        ffn=4096, n_experts=16,
    )  # fmt: skip
    data = {"seq_len": 2048, "batch_size": 8}
    two = from_tree(RunConfig, {"data": data} | {"model": vars(shape)})
    one = from_tree(RunConfig, {"data": data} | {"model": vars(shape) | {"ffn": 2048}})
    assert choose(two, GPU, 47 * 10**9, wanted=4).recompute == "none"
    assert choose(one, GPU, 11 * 10**9, wanted=4).k == 4
