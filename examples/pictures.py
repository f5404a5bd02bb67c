"""Draw the picture of an example's README: run its program once per scheme, and read the logs.

python examples/pictures.py digits          # or resnet, segmentation, language_model; some minutes each
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
import yaml
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).resolve().parent
sys.path.append(str(EXAMPLES.parent))  # the checkout

from benchmarks.palette import COLOURS  # noqa: E402

SCHEME = "--trainer.strategy.init_args.scheme"


@dataclass(frozen=True)
class Line:
    """One curve of a plot.

    Args:
        label: Label in the legend.
        method: Key of its color.
        configs: Configuration files after config.yaml.
        arguments: Command-line arguments.
        dashed: Whether it is a variant of a method that has a solid curve.
    """

    label: str
    method: str
    configs: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    dashed: bool = False


def train(example: str, line: Line, folder: Path, *arguments: str) -> Path:
    """Run the example's program. Return the folder with ``metrics.csv`` and ``checkpoints``."""
    logs = folder / line.label.replace(" ", "-")
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {
            "save_dir": str(logs),
            "name": "",
            "version": None,
        },  # the digits program tests after fit: version_1
    }
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"trainer": {"logger": logger, "enable_progress_bar": False}}))
    configs = [str(EXAMPLES / example / name) for name in ("config.yaml", *line.configs)]
    options = [option for config in (*configs, str(settings)) for option in ("--config", config)]
    command = [sys.executable, str(EXAMPLES / example / "main.py"), "fit", *options, *line.arguments, *arguments]
    print(f"{example}: {line.label}", file=sys.stderr, flush=True)
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if finished.returncode:
        sys.exit(finished.stdout + finished.stderr)
    return logs / "version_0"


def read_curve(logs: Path, metric: str) -> list[tuple[int, float, float]]:
    """Return (step, MB that a node has sent to others so far, metric) of each time the metric was logged."""
    rows = sorted(csv.DictReader((logs / "metrics.csv").open()), key=lambda row: int(row["step"]))
    sent, last, curve = 0.0, -1, []
    for row in rows:
        step = int(row["step"])
        if row.get("hiercomm/inter_bytes"):
            sent += float(row["hiercomm/inter_bytes"]) * (step - last) / 1e6
            last = step
        if row.get(metric):
            curve.append((step + 1, sent, float(row[metric])))
    return curve


def draw_curves(axes: Any, example: str, lines: list[Line], metric: str, folder: Path, *arguments: str) -> list[Path]:
    """Train every line, and draw the metric against the MB sent. Return the folders with the logs."""
    folders = []
    for line in lines:
        folders.append(train(example, line, folder, *arguments))
        _, sent, values = zip(*read_curve(folders[-1], metric), strict=True)
        style = {"color": COLOURS[line.method], "linestyle": "--" if line.dashed else "-"}
        axes.plot(sent, values, label=line.label, marker="o", markersize=3, **style)
    axes.set(xscale="log", xlabel="MB that a node sent to others")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return folders


def trained_module(example: str, logs: Path, name: str) -> Any:
    """Load the averaged model of a run from its checkpoint."""
    sys.path.insert(0, str(EXAMPLES / example))
    module = __import__("model")
    (checkpoint,) = (logs / "checkpoints").glob("*.ckpt")
    return getattr(module, name).load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()


def digits(folder: Path) -> Any:
    lines = [
        Line("AllReduce", "all_reduce", ["all_reduce.yaml"]),
        Line("PeriodicAveraging(4)", "periodic"),
        Line("DASO", "daso", ["daso.yaml"]),
        Line("DiLoCo", "diloco", ["diloco.yaml"]),
        Line("StepsDelay", "steps_delay", ["steps_delay.yaml"]),
        Line("Gossip", "gossip", ["gossip.yaml"]),
    ]
    figure, (curves, grid) = plt.subplots(1, 2, figsize=(10, 4))
    logs = draw_curves(curves, "digits", lines, "val_accuracy", folder)
    curves.set(ylabel="held-out accuracy", ylim=(0.6, 1.005))
    curves.set_title("Averaged model after each of 15 epochs", fontsize=10)
    model = trained_module("digits", logs[1], "DigitsCNN")
    data = __import__("data").DigitsDataModule()
    data.setup("test")
    images, classes = next(iter(torch.utils.data.DataLoader(data.test, 360)))
    with torch.no_grad():
        predicted = model(images).argmax(1)
    wrong = (predicted != classes).nonzero().flatten().tolist()
    chosen = sorted((wrong + [index for index in range(360) if index not in wrong])[:24])
    captions = [(f"{predicted[i]}", bool(predicted[i] == classes[i])) for i in chosen]
    draw_grid(grid, [images[i, 0] for i in chosen], captions)
    grid.set_title(f"PeriodicAveraging: {360 - len(wrong)} of 360 test images correct", fontsize=10)
    return figure


def resnet(folder: Path) -> Any:
    daso = {"sync_every": 4, "staleness": 1, "warmup": {"epochs": 2}, "cooldown": {"epochs": 2}}
    lines = [
        Line("AllReduce", "all_reduce", arguments=[f"{SCHEME}=all_reduce"]),
        Line("PeriodicAveraging(8)", "periodic"),
        Line("DASO(4, 1)", "daso", arguments=[scheme("DASO", **daso)]),
    ]
    figure, (curves, grid) = plt.subplots(1, 2, figsize=(10, 4))
    logs = draw_curves(curves, "resnet", lines, "val_accuracy", folder)
    curves.set(ylabel="held-out accuracy")
    curves.set_title("Averaged model after each of 10 epochs", fontsize=10)
    model = trained_module("resnet", logs[1], "Classifier")
    held_out = __import__("data").ColouredDigits(held_out=True)
    samples = [held_out[index] for index in range(24)]
    with torch.no_grad():
        predicted = model(torch.stack([image for image, _ in samples])).argmax(1).tolist()
    shown = [image.add(1).div(2).clamp(0, 1).permute(1, 2, 0) for image, _ in samples]
    draw_grid(grid, shown, [(f"{p}", p == c) for p, (_, c) in zip(predicted, samples, strict=True)])
    grid.set_title("PeriodicAveraging: predictions for held-out images", fontsize=10)
    return figure


def segmentation(folder: Path) -> Any:
    lines = [
        Line("AllReduce", "all_reduce", arguments=[f"{SCHEME}=all_reduce"]),
        Line("PeriodicAveraging(4)", "periodic", arguments=[scheme("PeriodicAveraging", sync_every=4)]),
        Line("DASO(4, 1)", "daso"),
    ]
    figure, (curves, grid) = plt.subplots(1, 2, figsize=(10, 4))
    logs = draw_curves(curves, "segmentation", lines, "mean_iou", folder)
    curves.set(ylabel="mean intersection over union")
    curves.set_title("Averaged model after each of 12 epochs", fontsize=10)
    model = trained_module("segmentation", logs[2], "Segmentation")
    held_out = __import__("data").DrawnStreets(512, 64, 32)
    images, labels = zip(*(held_out[index] for index in range(4)), strict=True)
    with torch.no_grad():
        predicted = model(torch.stack(images)).argmax(1)
    colors = torch.tensor([[0.6, 0.8, 1.0], [0.4, 0.4, 0.4], [0.8, 0.5, 0.3], [0.2, 0.6, 0.3], [0.9, 0.8, 0.3]])
    shown = []
    for image, label, prediction in zip(images, labels, predicted, strict=True):
        shown += [image.permute(1, 2, 0).clamp(0, 1), colors[label], colors[prediction]]
    draw_grid(grid, shown, [("", True)] * len(shown), columns=3)
    grid.set_title("DASO: images, labels, predictions", fontsize=10)
    return figure


def language_model(folder: Path) -> Any:
    lines = [
        Line("AllReduce", "all_reduce", ["ddp.yaml"], [f"{SCHEME}=all_reduce"]),
        Line("PeriodicAveraging(25)", "periodic", ["ddp.yaml"], [scheme("PeriodicAveraging", sync_every=25)]),
        Line("DiLoCo(25)", "diloco", ["ddp.yaml"]),
        Line("DiLoCo(25), int4 wire", "diloco", ["ddp.yaml"], ["--trainer.strategy.init_args.wire_dtype=int4"], True),
    ]
    figure, axes = plt.subplots(figsize=(6.5, 4))
    frequent_validation = [
        "--trainer.max_steps=150",
        "--trainer.val_check_interval=25",
        "--trainer.check_val_every_n_epoch=null",
    ]
    draw_curves(
        axes,
        "language_model",
        lines,
        "val_bits_per_byte",
        folder,
        *frequent_validation,
        "--trainer.log_every_n_steps=25",
    )
    axes.set(ylabel="bits per byte of held-out text")
    axes.set_title("Averaged model at every 25th of 150 steps", fontsize=10)
    return figure


def scheme(name: str, **arguments: Any) -> str:
    """Return the command-line option that selects a scheme."""
    value = {"class_path": f"lightning_hiercomm.{name}", "init_args": arguments}
    return f"{SCHEME}={json.dumps(value)}"


def draw_grid(axes: Any, images: list[Any], captions: list[tuple[str, bool]], columns: int = 8) -> None:
    """Draw images in rows. A caption is a text and whether it is correct: wrong ones are red."""
    axes.set_axis_off()
    rows = -(-len(images) // columns)
    for index, (image, (text, is_correct)) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        cell = axes.inset_axes((column / columns, 1 - (row + 1) / rows, 0.95 / columns, 0.9 / rows))
        cell.imshow(image, cmap="gray_r", aspect="equal")
        cell.set(xticks=[], yticks=[])
        cell.set_xlabel(text, color="black" if is_correct else "red", fontsize=8, labelpad=1)


PICTURES: dict[str, Callable[[Path], Any]] = {
    "digits": digits,
    "resnet": resnet,
    "segmentation": segmentation,
    "language_model": language_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=PICTURES)
    parser.add_argument("--output", type=Path, help="default: picture.png in the example's folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figure = PICTURES[arguments.example](Path(folder))
    figure.tight_layout()
    path = arguments.output or EXAMPLES / arguments.example / "picture.png"
    figure.savefig(path, dpi=80, bbox_inches="tight")
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the size
    print(path)


if __name__ == "__main__":
    main()
