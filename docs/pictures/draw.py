"""Draw `nodes.svg` and `timelines.svg`: `python docs/pictures/draw.py`. A test fails when they are stale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from svg import arrow, box, picture, text

HERE = Path(__file__).parent

STEP, WHOLE = 40.0, 80.0  # pixels of a step of training, and of an exchange of everything in float32
LEFT, LENGTH, ROW = 250.0, 660.0, 64.0
TRAINING, NETWORK, FIRST_THIRD = "#b9c7d3", "#0072b2", STEP / 3
Block = tuple[str, float, float]
"""A kind (``train`` or ``send``), the beginning and the end."""


def nodes() -> str:
    """Draw two nodes of four ranks."""
    parts = []
    for node, left in enumerate((20, 345)):
        parts += [box(left, 40, 205, 160), text(left + 102, 30, f"node {node}", "name", "middle")]
        places = [(left + 50, 80), (left + 155, 80), (left + 50, 160), (left + 155, 160)]
        for index, (x, y) in enumerate(places):
            parts += [f'<path class="line" d="M{x} {y}L{x2} {y2}"/>' for x2, y2 in places[index + 1 :]]
        for index, (x, y) in enumerate(places):
            parts.append(f'<circle cx="{x}" cy="{y}" r="27" fill="#fff" stroke="#47525c"/>')
            parts.append(text(x, y + 5, f"rank {4 * node + index}", "", "middle"))
        parts.append(text(left + 102, 224, "fast: gradients, every step", "", "middle"))
    parts.append('<path class="line dashed" d="M225 120H345" stroke-width="3"/>')
    parts += [text(285, 108, "slow network", "", "middle"), text(285, 142, "compressed,", "", "middle")]
    parts += [text(285, 162, "rarely, or", "", "middle"), text(285, 182, "overlapped", "", "middle")]
    return picture(570, 240, parts, "two nodes of four ranks each, joined by a slow network")


def ddp() -> Iterator[Block]:
    """Gradients travel during the backward pass, and the next step waits for them."""
    begin = 0.0
    while True:
        yield "train", begin, begin + STEP
        yield "send", begin + FIRST_THIRD, begin + FIRST_THIRD + WHOLE
        begin += FIRST_THIRD + WHOLE


def all_reduce() -> Iterator[Block]:
    """In int8 a quarter of the bytes travels, which the backward pass hides here."""
    begin = 0.0
    while True:
        yield "train", begin, begin + STEP
        yield "send", begin + FIRST_THIRD, begin + FIRST_THIRD + WHOLE / 4
        begin += STEP


def periodic(period: int = 4) -> Iterator[Block]:
    """Parameters travel after a period, and training waits."""
    begin = 0.0
    while True:
        for _ in range(period):
            yield "train", begin, begin + STEP
            begin += STEP
        yield "send", begin, begin + WHOLE
        begin += WHOLE


def streaming_diloco(period: int = 8, fragments: int = 2) -> Iterator[Block]:
    """A fragment travels during the step after the one that is its turn."""
    step = 0
    while True:
        yield "train", step * STEP, (step + 1) * STEP
        if (step + 2) % (period // fragments) == 0:
            yield "send", (step + 1) * STEP, (step + 1) * STEP + WHOLE / fragments
        step += 1


def daso(period: int = 4, staleness: int = 2) -> Iterator[Block]:
    """Parameters travel during the steps until they are merged."""
    assert staleness * STEP >= WHOLE
    step = 0
    while True:
        yield "train", step * STEP, (step + 1) * STEP
        if step % period == 0:
            yield "send", (step + 1) * STEP, (step + 1) * STEP + WHOLE
        step += 1


def steps_delay(delay: int = 4) -> Iterator[Block]:
    """Gradients are pushed at every step, weights pulled every few: half an all-reduce each, here in bfloat16."""
    step = 0
    while True:
        yield "train", step * STEP, (step + 1) * STEP
        pulls = 2 if step % delay == delay - 1 else 1
        yield "send", (step + 1) * STEP, (step + 1) * STEP + pulls * WHOLE / 4
        step += 1


def gossip() -> Iterator[Block]:
    """The model travels to one peer during the next step; with two nodes as many bytes as an all-reduce sends."""
    step = 0
    while True:
        yield "train", step * STEP, (step + 1) * STEP
        yield "send", (step + 1) * STEP, (step + 1) * STEP + WHOLE / 4
        step += 1


TIMELINES = (
    ("DDP, float32", "waits for gradients", ddp()),
    ("AllReduce, int8", "hidden behind the backward pass", all_reduce()),
    ("PeriodicAveraging(4)", "waits, but rarely", periodic()),
    ("DiLoCo(8, fragments=2, staleness=1)", "half of the model at a time", streaming_diloco()),
    ("DASO(4, staleness=2), cycling", "merged two steps later", daso()),
    ("StepsDelay(4), bfloat16", "pushes, and pulls every 4 steps", steps_delay()),
    ("Gossip(overlap=True), int8", "one peer, during the next step", gossip()),
)


def timelines() -> str:
    """Draw what a node trains and sends, for each scheme."""
    parts = [
        box(LEFT, 14, 26, 12, TRAINING, 2),
        text(LEFT + 34, 24, "a step of training"),
        box(LEFT + 190, 14, 26, 12, NETWORK, 2),
        text(LEFT + 224, 24, "the network between nodes"),
    ]
    for row, (name, note, blocks) in enumerate(TIMELINES):
        top = 44 + row * ROW
        parts += [text(14, top + 16, name), text(14, top + 34, note, "small")]
        for kind, begin, end in blocks:
            if begin >= LENGTH:
                break
            y, colour = (top, TRAINING) if kind == "train" else (top + 22, NETWORK)
            parts.append(box(LEFT + begin + 0.5, y, min(end, LENGTH) - begin - 1, 18, colour, 2))
    bottom = 44 + len(TIMELINES) * ROW
    parts += [
        arrow(f"M{LEFT:.0f} {bottom - 6:.0f}H{LEFT + LENGTH:.0f}"),
        text(LEFT + LENGTH, bottom + 12, "time", "small", "end"),
    ]
    return picture(LEFT + LENGTH + 20, bottom + 22, parts, "when a node trains and sends, by scheme")


def elastic() -> str:
    """Draw the states of an elastic node."""
    places = {
        "joining": (30, 60, "asks the lighthouse for a quorum"),
        "recovering": (30, 230, "receives the state of the run"),
        "training": (340, 230, "steps by itself"),
        "quorum": (650, 230, "which nodes take part?"),
        "exchange": (650, 60, "parameters, over the network"),
        "vote": (340, 60, "have all members succeeded?"),
        "lost": (340, 400, "killed, suspended or cut off"),
        "finished": (650, 400, "exit code 0"),
    }
    parts = [
        text(610, 40, "a synchronization: quorum, exchange and vote, on all members or on none", "small", "middle"),
    ]
    for name, (x, y, note) in places.items():
        parts += [box(x, y, 220, 66), text(x + 110, y + 28, name, "name", "middle")]
        parts.append(text(x + 110, y + 49, note, "small", "middle"))
    parts += [
        arrow("M140 126V230"),
        text(148, 182, "admitted"),
        arrow("M250 263H340"),
        text(295, 252, "restored", "small", "middle"),
        arrow("M560 263H650"),
        text(605, 252, "period over", "small", "middle"),
        arrow("M760 230V126"),
        text(768, 182, "connected"),
        arrow("M650 93H560"),
        arrow("M450 126V230"),
        text(458, 182, "yes: commit"),
        arrow("M530 126L690 230"),
        text(622, 172, "no: roll back"),
        arrow("M450 296V400"),
        text(458, 350, "at any time"),
        arrow("M340 433H14V93H30", is_dashed=True),
        text(24, 425, "restarted by its supervisor (exit code 75 or a signal)", "small"),
        arrow("M540 296L680 400"),
        text(632, 350, "last step"),
        text(140, 46, "a node starts", "small", "middle"),
    ]
    return picture(900, 490, parts, "the states of an elastic node")


PICTURES = {"nodes": nodes, "timelines": timelines, "elastic": elastic}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())
