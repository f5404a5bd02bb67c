"""DiLoCo, against traces worked by hand and the plainest calculation of the same equations in one place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import reloaded
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lightning_hiercomm.schemes import AllReduce, DiLoCo, OuterOptimizer, ParameterSync

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TWO = ((0,), (1,))
TWO_OF_TWO = ((0, 1), (2, 3))
UNEQUAL = ((0, 1), (2,))
SEVENS = {"a": 7, "b": 5, "c": 11}  # odd sizes, so that shards, buckets and fragments cut tensors
WIRES = [None, "bfloat16", "float16", "int8", "int4"]


def constant(*gradients):
    """Train ``steps`` steps with a constant gradient per rank; all values after each."""

    def work(rank, steps):
        seen = []
        for _ in range(steps):
            rank.train(lambda x: torch.full_like(x, gradients[rank.rank]))
            seen.append(rank.values.tolist())
        return seen

    return lambda steps: lambda rank: work(rank, steps)


def towards(numel, steps):
    """Train ``steps`` steps on rank r's loss ``0.5 (x - target_r)^2``; all values after each."""

    def work(rank):
        target = target_of(rank.rank, numel)
        trace = []
        for _ in range(steps):
            rank.train(lambda x: x - target[: x.numel()].to(x.dtype))
            trace.append(rank.values)
        return torch.stack(trace)

    return work


def target_of(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "nodes", "gradients", "expected"),
    [
        (
            DiLoCo(2),
            TWO,
            (1.0, 3.0),
            {
                2: [0.468, 0.468],
                3: [0.368, 0.168],
                4: [-0.2908, -0.2908],
                6: [-1.25372, -1.25372],
                8: [-2.400348, -2.400348],
            },
        ),
        (DiLoCo(2), UNEQUAL, (1.0, 1.0, 3.0), {2: [1.67 / 3] * 3, 4: [-0.227 / 3] * 3, 6: [-0.8781] * 3}),
        (DiLoCo(2), UNEQUAL, (0.5, 1.5, 3.0), {2: [1.67 / 3] * 3, 4: [-0.227 / 3] * 3, 6: [-0.8781] * 3}),
        (
            DiLoCo(3, staleness=2, keep_local=0.0),
            TWO,
            (1.0, 3.0),
            {3: [0.734] * 2, 5: [0.534, 0.134], 6: [0.3546] * 2, 9: [-0.12686] * 2},
        ),
    ],
    ids=["DiLoCo", "unequal nodes", "unequal ranks", "stale by two"],
)
def test_one_weight_follows_the_trace(on_nodes, scheme, nodes, gradients, expected):
    for rank, seen in enumerate(on_nodes(constant(*gradients)(9), scheme, nodes)):
        for step, values in expected.items():
            assert seen[step - 1] == pytest.approx([values[rank]], abs=1e-6), step


def test_streamed_fragments_follow_the_trace(on_nodes):
    scheme = DiLoCo(4, fragments=2, staleness=1, keep_local=0.5)
    expected = {
        2: [(0.767, 0.8), (0.567, 0.4)],
        4: [(0.567, 0.401), (-0.033, 0.001)],
        6: [(0.050245, 0.201), (-0.449755, -0.599)],
        8: [(-0.149755, -0.468265), (-1.049755, -1.068265)],
        10: [(-0.902865, -0.668265), (-1.552865, -1.668265)],
        12: [(-1.102865, -1.51281), (-2.152865, -2.21281)],
    }
    for shapes in ({"f0": 1, "f1": 1}, {"both": 2}):
        for rank, seen in enumerate(on_nodes(constant(1.0, 3.0)(12), scheme, TWO, shapes=shapes)):
            for step, values in expected.items():
                assert seen[step - 1] == pytest.approx(values[rank], abs=1e-6), step


# ---- the same equations, calculated in one place ---------------------------------------------------------------------


def plainly(steps, weights, fragments, *, sync_every, staleness, keep_local, outer, gradient, start=1.0, lr=0.1):
    """Section 8's equations as they are printed; every node's values after each step, and their weighted means.

    ``weights`` are the nodes', ``fragments`` the elements of each, ``gradient(node, x)`` the node's own.
    """
    count, size = len(weights), sum(fragments)
    x = [torch.full((size,), start, dtype=torch.float64) for _ in range(count)]
    ends = torch.tensor(fragments).cumsum(0).tolist()
    slices = [slice(end - length, end) for end, length in zip(ends, fragments, strict=True)]
    references = [torch.nn.Parameter(torch.full((length,), start, dtype=torch.float64)) for length in fragments]
    optimizers = [outer([reference]) for reference in references]
    on_the_way, trace, averaged = {}, [], []
    for t in range(1, steps + 1):
        for node in range(count):
            x[node] = x[node] - lr * gradient(node, x[node])
        for p, part in enumerate(slices):
            due_after = (p + 1) * sync_every // len(slices) % sync_every
            if (t + staleness) % sync_every == due_after:
                on_the_way[p] = sum(w * (references[p].detach() - own[part]) for w, own in zip(weights, x, strict=True))
            if t % sync_every == due_after and p in on_the_way:
                references[p].grad = on_the_way.pop(p)
                optimizers[p].step()
                for own in x:
                    own[part] = keep_local * own[part] + (1 - keep_local) * references[p].detach()
        trace.append([own.clone() for own in x])
        averaged.append(sum(w * own for w, own in zip(weights, x, strict=True)))
    return trace, averaged


NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
OUTER = {
    "nesterov": NESTEROV,
    "adam": partial(Adam, lr=0.05),
    "adamw": partial(AdamW, lr=0.05, weight_decay=0.1),
    "plain": partial(SGD, lr=1.0),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize(
    ("sync_every", "fragments", "staleness", "keep_local"),
    [(3, 1, 0, 0.0), (4, 1, 3, 0.25), (6, 2, 0, 0.0), (6, 2, 2, 0.5), (7, 3, 1, 0.3)],
)
@pytest.mark.parametrize("nodes", [TWO, TWO_OF_TWO, ((0, 1, 2), (3,), (4, 5))], ids=str)
@pytest.mark.parametrize("bucket_bytes", [2**22, 24], ids=["whole", "small buckets"])
def test_every_form_follows_the_equations(
    on_nodes, outer, sync_every, fragments, staleness, keep_local, nodes, bucket_bytes
):
    numel, steps = sum(SEVENS.values()), 3 * sync_every + 2
    per_node = [torch.stack([target_of(rank, numel) for rank in ranks]).mean(0) for ranks in nodes]
    world = sum(map(len, nodes))
    length = -(-numel // fragments)
    expected, _ = plainly(
        steps,
        [len(ranks) / world for ranks in nodes],
        [min(length, numel - p * length) for p in range(fragments)],
        sync_every=sync_every,
        staleness=staleness,
        keep_local=keep_local,
        outer=OUTER[outer],
        gradient=lambda node, x: x - per_node[node],
    )
    scheme = DiLoCo(sync_every, OUTER[outer], fragments, staleness, keep_local)
    arguments = {"shapes": SEVENS, "dtype": torch.float64, "bucket_bytes": bucket_bytes}
    for rank, trace in enumerate(on_nodes(towards(numel, steps), scheme, nodes, **arguments)):
        node = next(m for m, ranks in enumerate(nodes) if rank in ranks)
        torch.testing.assert_close(trace, torch.stack([step[node] for step in expected]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sync_every", "fragments", "staleness", "kept"), [(4, 1, 0, 0.0), (4, 1, 3, 0.5), (6, 2, 2, 0.5)]
)
def test_stale_outer_steps_keep_half_of_local_values_by_default(on_nodes, sync_every, fragments, staleness, kept):
    targets = [torch.stack([target_of(rank, 24) for rank in ranks]).mean(0) for ranks in TWO_OF_TWO]
    expected, averaged = plainly(
        14,
        [0.5, 0.5],
        [24 // fragments] * fragments,
        sync_every=sync_every,
        staleness=staleness,
        keep_local=kept,
        outer=NESTEROV,
        gradient=lambda node, x: x - targets[node],
    )

    def work(rank):
        return towards(24, 14)(rank), rank.averaged()

    scheme = DiLoCo(sync_every, fragments=fragments, staleness=staleness)
    seen = on_nodes(work, scheme, TWO_OF_TWO, shapes={"a": 10, "b": 14}, dtype=torch.float64)
    for rank, (trace, mean) in enumerate(seen):
        torch.testing.assert_close(trace, torch.stack([step[rank // 2] for step in expected]), rtol=0, atol=1e-12)
        torch.testing.assert_close(mean, averaged[-1], rtol=0, atol=1e-12)


def test_fragments_by_module_names_are_due_in_their_order(on_nodes):
    # c, then a, then what is left; each once in six steps
    scheme = DiLoCo(6, partial(SGD, lr=1.0), fragments=["c", "a"])

    def work(rank):
        synchronized_after = {}
        for step in range(1, 7):
            rank.train(lambda x: torch.full_like(x, 1.0 + 2 * rank.rank))
            everyones = rank.topology.world.all_gather_object(
                {name: p.detach().clone().cpu() for name, p in rank.module.items()}
            )
            for name in SEVENS:
                if torch.equal(everyones[0][name], everyones[1][name]):
                    synchronized_after.setdefault(name, step)
        return synchronized_after

    assert on_nodes(work, scheme, TWO, shapes=SEVENS) == [{"c": 2, "a": 4, "b": 6}] * 2


@pytest.mark.parametrize("scheme", [DiLoCo(2), DiLoCo(4, fragments=2, staleness=1, keep_local=0.5)], ids=repr)
@pytest.mark.parametrize("nodes", [((0,),), ((0, 1, 2),)], ids=str)
def test_on_one_node_it_is_data_parallel_training(on_nodes, scheme, nodes):
    alone = on_nodes(towards(23, 9), scheme, nodes, shapes=SEVENS)
    baseline = on_nodes(towards(23, 9), AllReduce(), nodes, shapes=SEVENS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, baseline, strict=True))


@pytest.mark.parametrize("staleness", [0, 2])
def test_all_ranks_hold_the_same_bits_after_a_merge_on_every_wire(on_nodes, staleness):
    for wire in WIRES:
        for nodes in (TWO_OF_TWO, UNEQUAL, ((0,), (1,), (2,))):
            scheme = DiLoCo(4, staleness=staleness, keep_local=0.0)
            traces = on_nodes(towards(23, 8), scheme, nodes, shapes=SEVENS, wire=wire)
            for step in (4, 8):
                assert all(torch.equal(trace[step - 1], traces[0][step - 1]) for trace in traces), (wire, nodes)
            assert not torch.equal(traces[0][4], traces[-1][4])


# ---- the outer learning rate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "staleness"), [(1, 0), (1, 4), (2, 0), (3, 1)])
def test_the_outer_scheduler_counts_periods(on_nodes, fragments, staleness):
    scheme = DiLoCo(
        4 if staleness == 4 else 6,
        partial(SGD, lr=0.8),
        fragments,
        min(staleness, 3),
        outer_scheduler=partial(StepLR, step_size=1, gamma=0.5),
    )

    def work(rank):
        seen = []
        for _ in range(scheme.sync_every * 3):
            rank.train(torch.ones_like)
            seen.append(rank.scheme.scalars()["outer_lr"])
        return seen

    for seen in on_nodes(work, scheme, TWO, shapes=SEVENS):
        every = scheme.sync_every
        assert seen == [0.8] * (every - 1) + [0.4] * every + [0.2] * every + [0.1]


def test_an_outer_learning_rate_acts_on_the_merges_of_its_period(on_nodes):
    # outer rates 1, then 0 (nothing moves), then 1
    scheme = DiLoCo(2, partial(SGD, lr=1.0), outer_scheduler=partial(LambdaLR, lr_lambda=lambda k: float(k != 1)))
    seen = on_nodes(constant(1.0, 3.0)(6), scheme, TWO)[0]
    assert [seen[step - 1][0] for step in (2, 4, 6)] == pytest.approx([0.6, 0.6, 0.2])


# ---- the averaged model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "scheme",
    [
        DiLoCo(3),
        DiLoCo(6, staleness=3),
        DiLoCo(6, fragments=2, staleness=2, keep_local=0.5),
    ],
    ids=["at once", "stale", "streaming"],
)
def test_reading_the_averaged_model_at_every_step_changes_nothing(on_nodes, scheme, wire):
    def asking(rank):
        target = target_of(rank.rank, 23)
        trace = []
        for _ in range(13):
            rank.train(lambda x: x - target.to(x.dtype))
            averaged = rank.topology.world.all_gather_object(rank.averaged())
            assert all(torch.equal(one, averaged[0]) for one in averaged)
            rank.scheme.state_dict(shared=True)  # as a plain checkpoint does
            trace.append(rank.values)
        return torch.stack(trace)

    asked = on_nodes(asking, scheme, TWO_OF_TWO, shapes=SEVENS, wire=wire)
    left_alone = on_nodes(towards(23, 13), scheme, TWO_OF_TWO, shapes=SEVENS, wire=wire)
    assert all(torch.equal(one, other) for one, other in zip(asked, left_alone, strict=True))


def test_saved_outer_scheduler_counts_the_pending_period(on_nodes):
    scheme = DiLoCo(4, partial(SGD, lr=0.5), staleness=2, outer_scheduler=partial(StepLR, step_size=1, gamma=0.5))
    saved = {}

    def first(rank):
        for _ in range(7):  # sent after the sixth step, to be merged after the eighth
            rank.train()
        saved[rank.rank] = reloaded(rank.scheme.state_dict(shared=True))
        for _ in range(5):
            rank.train()
        return rank.scheme.scalars()["outer_lr"]

    def resumed(rank):
        rank.scheme.load_state_dict(saved[rank.rank])
        rank.scheme.begin_run(1, None)
        for _ in range(5):
            rank.train()
        return rank.scheme.scalars()["outer_lr"]

    assert on_nodes(first, scheme) == on_nodes(resumed, scheme) == [0.0625] * 2


@pytest.mark.parametrize(("fragments", "staleness", "keep_local"), [(1, 0, 0.0), (1, 3, 0.0), (2, 2, 0.5)])
def test_the_averaged_model_is_the_mean_of_present_parameters(on_nodes, fragments, staleness, keep_local):
    scheme, steps = DiLoCo(6, fragments=fragments, staleness=staleness, keep_local=keep_local), 15

    def work(rank):
        target = target_of(rank.rank, 24)
        seen = []
        for _ in range(steps):
            rank.train(lambda x: x - target)
            seen.append(rank.averaged())
        return torch.stack(seen)

    targets = [torch.stack([target_of(rank, 24) for rank in ranks]).mean(0) for ranks in TWO_OF_TWO]
    _, expected = plainly(
        steps,
        [0.5, 0.5],
        [24 // fragments] * fragments,
        sync_every=6,
        staleness=staleness,
        keep_local=keep_local,
        outer=NESTEROV,
        gradient=lambda node, x: x - targets[node],
    )
    for seen in on_nodes(work, scheme, TWO_OF_TWO, shapes={"a": 10, "b": 14}, dtype=torch.float64):
        torch.testing.assert_close(seen, torch.stack(expected), rtol=0, atol=1e-12)


def test_unfreezing_keeps_the_outer_momentum_of_others(on_nodes):
    steps = 12

    def work(rank):
        target = target_of(rank.rank, 23)
        trace = []
        for step in range(steps):
            if step == 6 and "b" in frozen:  # what `TrainingRun.step` does
                rank.module["b"].requires_grad_(True)
                rank.scheme.synchronize()
                rank.scheme.follow(rank.replica())
            # each tensor has a target of its own, whatever else is trained
            pieces = dict(zip(SEVENS, target.split(list(SEVENS.values())), strict=True))
            own = torch.cat([pieces[name] for name, p in rank.module.items() if p.requires_grad])
            rank.train(lambda x: x - own)  # noqa: B023
            trace.append({name: p.detach().clone() for name, p in rank.module.items()})
        return trace

    arguments = {"shapes": SEVENS, "dtype": torch.float64, "bucket_bytes": 48}
    frozen = ("b",)
    unfrozen = on_nodes(work, DiLoCo(3), TWO_OF_TWO, frozen=frozen, **arguments)
    frozen = ()
    whole = on_nodes(work, DiLoCo(3), TWO_OF_TWO, **arguments)
    for one, other in zip(unfrozen, whole, strict=True):
        for name in ("a", "c"):
            torch.testing.assert_close(one[-1][name], other[-1][name], rtol=0, atol=1e-14)
        # b trained for half as long, from the beginning
        torch.testing.assert_close(one[-1]["b"], other[5]["b"], rtol=0, atol=1e-14)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["nesterov", "adamw"])
@pytest.mark.parametrize(
    ("nodes", "fragments", "elements", "bucket_bytes"),
    [
        (((0,), (1,), (2,)), 1, [range(23)], 2**22),
        (UNEQUAL, 2, [range(12), range(12, 23)], 24),
        (TWO_OF_TWO, ["c"], [range(12, 23), range(12)], 40),
        (((0, 1, 2), (3, 4, 5)), 3, [range(8), range(8, 16), range(16, 23)], 16),
    ],
    ids=["three nodes", "unequal nodes", "named fragments", "six ranks"],
)
def test_a_plain_state_restores_the_outer_optimizer_on_other_nodes(
    on_nodes, outer, nodes, fragments, elements, bucket_bytes
):
    arguments = {"shapes": SEVENS, "dtype": torch.float64}
    target = target_of(0, 23)  # everyone's, so the number of nodes makes no difference

    def train(rank, steps):
        for _ in range(steps):
            rank.train(lambda x: x - target)

    def saving(rank):
        train(rank, 8)
        schedule = rank.scheme.state_dict(shared=True)
        rank.scheme.synchronize()
        return reloaded({"scheme": schedule, "values": rank.scheme.replica.snapshot()})

    saved = on_nodes(saving, DiLoCo(6, OUTER[outer]), TWO_OF_TWO, **arguments)
    assert all(repr(one) == repr(saved[0]) for one in saved)

    def resuming(rank):
        rank.scheme.replica.restore(saved[0]["values"])
        rank.scheme.load_state_dict(saved[0]["scheme"])
        assert repr(reloaded(rank.scheme.state_dict(shared=True))) == repr(saved[0]["scheme"])
        train(rank, 12)
        return rank.averaged()

    # the same in one place: an outer optimizer for each set of elements that the resumed run has as a fragment
    x = torch.ones(23, dtype=torch.float64)
    references = [torch.nn.Parameter(x[list(part)]) for part in elements]
    optimizers = [OUTER[outer]([reference]) for reference in references]
    for step in range(1, 21):
        x -= 0.1 * (x - target)
        for p, (part, reference, optimizer) in enumerate(zip(elements, references, optimizers, strict=True)):
            if step % 6 == (0 if step <= 8 else (p + 1) * 6 // len(elements) % 6):
                reference.grad = reference.detach() - x[list(part)]
                optimizer.step()
                x[list(part)] = reference.detach()
    for averaged in on_nodes(
        resuming, DiLoCo(6, OUTER[outer], fragments), nodes, bucket_bytes=bucket_bytes, **arguments
    ):
        torch.testing.assert_close(averaged, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["sidecar", "averaged"])
@pytest.mark.parametrize("kept", [0.0, 0.25, 0.5])
def test_resumed_run_keeps_its_saved_local_share(on_nodes, caplog, kept, how):
    implicit = partial(DiLoCo, 4, staleness=2, outer_scheduler=partial(StepLR, step_size=1, gamma=0.5))
    explicit, arguments = implicit(keep_local=kept), {"shapes": SEVENS, "dtype": torch.float64}

    def training(rank, steps):
        return towards(23, steps)(rank)

    def saving(rank):
        training(rank, 5)
        if how == "sidecar":
            return rank.state()
        schedule = rank.scheme.state_dict(shared=True)
        rank.scheme.synchronize()
        return reloaded({"scheme": schedule, "values": rank.scheme.replica.snapshot()})

    saved = on_nodes(saving, explicit, TWO_OF_TWO, **arguments)

    def resuming(rank):
        if how == "sidecar":
            rank.load(saved[rank.rank])
        else:
            rank.scheme.replica.restore(saved[0]["values"])
            rank.scheme.load_state_dict(saved[0]["scheme"])
        return training(rank, 8), rank.scheme.state_dict(shared=True)["kept_late"]

    said = on_nodes(resuming, explicit, TWO_OF_TWO, **arguments)
    assert "keep_local" not in caplog.text
    unsaid = on_nodes(resuming, implicit(), TWO_OF_TWO, **arguments)
    assert ("continues with keep_local" in caplog.text) == (kept != 0.5)
    for (ours, after), (theirs, _) in zip(unsaid, said, strict=True):
        assert after == kept
        assert torch.equal(ours, theirs)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every=0 must be a positive number"),
        ({"fragments": 0}, "fragments=0 must be a positive number, or a list"),
        ({"fragments": []}, r"fragments=\[\] must be a positive number, or a list"),
        ({"fragments": "layers"}, "fragments='layers' must be int"),
        ({"sync_every": 4, "fragments": 5}, "fragments=5 must not exceed sync_every=4"),
        ({"sync_every": 4, "staleness": 4}, "staleness=4 must be from 0 to 3"),
        ({"sync_every": 6, "fragments": 4, "staleness": 2}, "staleness=2 must be from 0 to 1"),
        ({"staleness": -1}, "staleness=-1"),
        ({"keep_local": 1.5}, "keep_local=1.5 must be a weight from 0"),
        ({"keep_local": -0.1}, "keep_local=-0.1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DiLoCo(**arguments)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (partial(getattr(torch.optim, name), lr=0.1), f"outer optimizer {name} cannot update the model's shards")
        for name in ("LBFGS", "Adafactor", "Muon")
        if hasattr(torch.optim, name)  # which comes later than the oldest torch
    ],
)
def test_an_outer_optimizer_of_whole_tensors_is_refused(on_nodes, outer, message):
    with pytest.raises(ValueError, match=message):
        on_nodes(towards(23, 1), DiLoCo(2, outer), TWO, shapes=SEVENS)


def test_more_fragments_by_name_than_the_period_has_room_for_are_refused(on_nodes):
    with pytest.raises(ValueError, match=r"staleness=2 must be at most 1 for .* with 3 fragments"):
        on_nodes(towards(23, 1), DiLoCo(6, fragments=["a", "c"], staleness=2), TWO, shapes=SEVENS)
    with pytest.raises(ValueError, match="no parameter is in 'd'"):
        on_nodes(towards(23, 1), DiLoCo(6, fragments=["d"]), TWO, shapes=SEVENS)


def test_a_fragment_by_name_may_hold_nothing_that_is_trained_now(on_nodes):
    scheme = DiLoCo(6, fragments=["a"])
    before = on_nodes(lambda rank: rank.train(1.0), scheme, shapes=SEVENS, start=1.0, frozen=["a"])
    assert all(values.eq(1.0).all() for values in before)


def test_watched_values_name_the_schedule(on_nodes):
    def work(rank):
        rank.train(torch.ones_like)
        return rank.scheme.scalars()

    for scalars in on_nodes(work, DiLoCo(8, partial(SGD, lr=0.3), staleness=2), TWO):
        assert scalars["sync_every"] == 8
        assert scalars["staleness"] == 2
        assert scalars["outer_lr"] == 0.3


@pytest.mark.parametrize(("staleness", "steps"), [(0, 8), (2, 6)])
def test_a_run_ends_with_an_outer_step_over_unsynchronized_changes(on_nodes, staleness, steps):
    # 8 steps of 0.1 and 0.3 from 1, averaged; what is done while an exchange travels is given up when it is merged
    def work(rank):
        constant(1.0, 3.0)(8)(rank)
        rank.scheme.finish()
        return rank.values.item()

    plain = DiLoCo(6, partial(SGD, lr=1.0), staleness=staleness, keep_local=0.0)
    assert on_nodes(work, plain, TWO) == [pytest.approx(1 - steps * 0.2, abs=1e-6)] * 2


@pytest.mark.parametrize("nodes", [TWO, TWO_OF_TWO], ids=str)
def test_fragments_of_one_tensor_resume_their_outer_steps(on_nodes, nodes):
    # after three steps the first fragment has taken one outer step, and the second, of the same tensor, none
    scheme = DiLoCo(4, partial(Adam, lr=0.1), fragments=2)
    arguments = {"shapes": {"x": 12}, "dtype": torch.float64, "bucket_bytes": 2**20}
    states = {}

    def saving(rank):
        target = target_of(rank.rank, 12)
        for step in range(8):
            if step == 3:
                states[rank.rank] = rank.state()
            rank.train(lambda x: x - target)
        return rank.trace[3:]

    def resuming(rank):
        rank.load(states[rank.rank])
        target = target_of(rank.rank, 12)
        for _ in range(5):
            rank.train(lambda x: x - target)
        return rank.trace

    assert on_nodes(saving, scheme, nodes, **arguments) == on_nodes(resuming, scheme, nodes, **arguments)


DAMPENED = partial(SGD, lr=0.7, momentum=0.9, dampening=0.5)  # whose first step is another than one with momentum zero


@pytest.mark.parametrize("outer", [partial(Adam, lr=0.1), DAMPENED], ids=["adam", "dampened"])
@pytest.mark.parametrize("nodes", [((0,), (1,), (2,)), UNEQUAL], ids=str)
def test_plain_state_restores_outer_steps_within_a_cut_tensor(on_nodes, outer, nodes):
    # after three steps the first half of the tensor has taken one outer step, and the second none
    scheme, target = DiLoCo(4, outer, fragments=2), target_of(0, 12)  # everyone's
    arguments = {"shapes": {"x": 12}, "dtype": torch.float64}

    def train(rank, steps):
        for _ in range(steps):
            rank.train(lambda x: x - target)
        return rank.trace

    def saving(rank):
        train(rank, 3)
        return reloaded({"scheme": rank.scheme.state_dict(shared=True), "values": rank.scheme.replica.snapshot()})

    saved = on_nodes(saving, scheme, TWO_OF_TWO, **arguments)[0]

    def resuming(rank):
        rank.scheme.replica.restore(saved["values"])
        rank.scheme.load_state_dict(saved["scheme"])
        assert repr(reloaded(rank.scheme.state_dict(shared=True))) == repr(saved["scheme"])
        return train(rank, 9)

    straight = on_nodes(lambda rank: train(rank, 12), scheme, TWO_OF_TWO, **arguments)[0]
    for trace in on_nodes(resuming, scheme, nodes, **arguments):
        torch.testing.assert_close(trace, straight[3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("nodes", [TWO_OF_TWO, UNEQUAL], ids=str)
@pytest.mark.parametrize("fragments", [1, 2, ["c"]], ids=str)
@pytest.mark.parametrize("outer", [partial(Adam, lr=0.1), DAMPENED], ids=["adam", "dampened"])
def test_freezing_and_unfreezing_keep_outer_steps_of_others(on_nodes, outer, fragments, nodes):
    # each element by itself: what is unfrozen begins with its first outer step, others go on with their next one
    def work(rank):
        target = target_of(0, 23)
        held = dict(zip(SEVENS, target.split(list(SEVENS.values())), strict=True))
        for step in range(16):
            changes = {5: ("b", True), 10: ("a", False)}.get(step)
            if changes is not None:
                rank.module[changes[0]].requires_grad_(changes[1])
                rank.module[changes[0]].grad = None
                rank.scheme.synchronize()
                rank.scheme.follow(rank.replica())
            names = [name for name, p in rank.module.named_parameters() if p.requires_grad]
            rank.train(lambda x, names=names: x - torch.cat([held[name] for name in names]))
        return {name: parameter.detach().clone() for name, parameter in rank.module.named_parameters()}

    def alone(name, first, last):
        """A parameter that is trained from one step to another, as long as it is trained by itself."""
        x = torch.ones(SEVENS[name], dtype=torch.float64)
        target = dict(zip(SEVENS, target_of(0, 23).split(list(SEVENS.values())), strict=True))[name]
        reference = torch.nn.Parameter(x.clone())
        optimizer = outer([reference])
        for step in range(16):
            if step in (5, 10):
                reference.data.copy_(x)
            if first <= step < last:
                x -= 0.1 * (x - target)
                if (step + 1) % 4 == 0:
                    reference.grad = reference.detach() - x
                    optimizer.step()
                    x = reference.detach().clone()
        return x

    scheme = DiLoCo(4, outer, fragments)
    if fragments != 1:
        scheme = ParameterSync(
            4, fragments, merge=OuterOptimizer(outer)
        )  # all at once, or parts would not be comparable
    arguments = {"shapes": SEVENS, "dtype": torch.float64, "frozen": ["b"], "bucket_bytes": 40}
    for held in on_nodes(work, scheme, nodes, **arguments):
        for name, (first, last) in {"a": (0, 10), "b": (5, 16), "c": (0, 16)}.items():
            torch.testing.assert_close(held[name], alone(name, first, last), rtol=0, atol=1e-12)


def test_unfreezing_during_an_exchange_keeps_the_schedulers_period(on_nodes):
    scheme = DiLoCo(4, partial(SGD, lr=1.0), staleness=2, outer_scheduler=partial(StepLR, step_size=1, gamma=0.5))

    def work(rank, unfreezes_before):
        rates = []
        for step in range(1, 13):
            if step == unfreezes_before:
                rank.module["b"].requires_grad_(True)
                rank.scheme.synchronize()
                rank.scheme.follow(rank.replica())
            rank.train(1.0)
            rates.append(rank.scheme.reference.outer.learning_rate)
        return rates[3::4]

    arguments = {"shapes": {"a": 2, "b": 2}, "frozen": ["b"], "dtype": torch.float64}
    for unfreezes_before in (3, 5):
        assert (
            on_nodes(partial(work, unfreezes_before=unfreezes_before), scheme, ((0,), (1,)), **arguments)
            == [[0.5, 0.25, 0.125]] * 2
        )
