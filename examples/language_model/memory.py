"""Calculate the memory per GPU of one_billion.yaml, from the shapes of a model on the meta device.

python examples/language_model/memory.py
"""

from pathlib import Path

import torch
import yaml
from model import Transformer


def main() -> None:
    config = yaml.safe_load((Path(__file__).parent / "one_billion.yaml").read_text())
    sizes = {name: config["model"][name] for name in ("width", "layers", "heads", "hidden")}
    ranks = config["trainer"]["devices"]
    with torch.device("meta"):
        net = Transformer(**sizes)
    elements = sum(parameter.numel() for parameter in net.parameters())
    block = sum(parameter.numel() for parameter in net.blocks[0].parameters())
    rows = {
        "parameters, float32": 4 * elements / ranks,
        "gradients, float32": 4 * elements / ranks,
        "AdamW's two moments": 8 * elements / ranks,
        "DiLoCo's reference parameters": 4 * elements / ranks,
        "DiLoCo's outer momentum": 4 * elements / ranks,
        "error-feedback residuals of int4": 4 * elements / ranks * (1 + 1 / config["trainer"]["num_nodes"]),
        "two blocks gathered by FSDP2, float32": 2 * 4 * block,
    }
    print(f"{elements / 1e9:.2f} billion parameters over {ranks} GPUs; calculated, without activations\n")
    print("| per GPU | GiB |\n|---|--:|")
    for name, nbytes in rows.items():
        print(f"| {name} | {nbytes / 2**30:.2f} |")
    print(f"| total | {sum(rows.values()) / 2**30:.2f} |")


if __name__ == "__main__":
    main()
