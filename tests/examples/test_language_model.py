"""The language model, with the model whole on every rank and sharded over the node."""

import re

import pytest
import yaml


def bits_learnt(folder, inside):
    example = folder.examples / "language_model"
    configurations = ("--config", example / "config.yaml", "--config", example / f"{inside}.yaml")
    output = folder.run(
        *(
            "language_model/main.py",
            "fit",
            *configurations,
            "--trainer.max_steps=16",
            "--trainer.val_check_interval=16",
        ),
        *("--trainer.limit_val_batches=8", "--trainer.strategy.init_args.scheme.init_args.sync_every=15"),
        *("--model.lr=0.01", "--data.context=32"),
    )
    assert "Communication of 16 optimizer steps on 4 ranks" in output
    assert float(re.search(r"([\d.]+) times what was sent", output)[1]) > 5
    found = re.search(r"needs ([\d.]+) bits per byte of held-out text", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.long("two runs on four ranks, the model whole and sharded, which have to learn the same")
@pytest.mark.slow
@pytest.mark.nightly
def test_both_ways_inside_the_node_learn_the_same(folder):
    whole, sharded = bits_learnt(folder, "ddp"), bits_learnt(folder, "fsdp2")
    assert whole < 4.5
    assert abs(whole - sharded) <= 0.01


def test_the_large_configuration_is_valid_and_its_memory_is_calculated(folder):
    large = folder.examples / "language_model" / "one_billion.yaml"
    assert "wire_dtype: int4" in folder.run("language_model/main.py", "fit", "--config", large, "--print_config")
    out = folder.run("language_model/memory.py")
    assert "1.03 billion parameters over 8 GPUs; calculated" in out
    assert re.search(r"\| total \| \d\.\d\d \|", out)


def test_the_last_validation_is_of_the_last_step_however_long_the_text_is(folder):
    trainer = yaml.safe_load((folder.examples / "language_model" / "config.yaml").read_text())["trainer"]
    assert trainer["check_val_every_n_epoch"] is None
    assert trainer["max_steps"] % trainer["val_check_interval"] == 0
