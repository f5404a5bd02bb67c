"""Passages of the documentation that quote measured numbers, and the paths of these numbers.

A name in braces stands for the result of its path in `MEASURED`; see `benchmarks.documents`.
"""

from __future__ import annotations

MEASURED = {
    "nodes4_periodic2": "tuned / nodes-4 / PeriodicAveraging(2) / AllReduce",
    "nodes4_steps08": "tuned / nodes-4 / StepsDelay(4), warm-up of 0.8 of the run / AllReduce",
    "nodes8_periodic4": "tuned / nodes-8 / PeriodicAveraging(4) / AllReduce",
    "nodes32_periodic4": "tuned / nodes-32 / PeriodicAveraging(4) / AllReduce",
    "adamw8_periodic4": "tuned / adamw-8 / PeriodicAveraging(4) / AllReduce",
    "nodes8_daso": "tuned / nodes-8 / DASO(4), a whole run / AllReduce",
    "nodes32_daso": "tuned / nodes-32 / DASO(4), a whole run / AllReduce",
    "long8_daso": "tuned / long-8 / DASO(4), its defaults / AllReduce",
    "daso8_delta": "tuned / nodes-8 / DASO(4), delta / DASO(4), a whole run",
    "stale8_21_ar": "tuned / stale-8 / B = 2, S = 1 / AllReduce",
    "stale8_41_ar": "tuned / stale-8 / B = 4, S = 1 / AllReduce",
    "stale8_81_ar": "tuned / stale-8 / B = 8, S = 1 / AllReduce",
    "stale8_81": "tuned / stale-8 / B = 8, S = 1 / B = 4, S = 1",
    "stale8_44": "tuned / stale-8 / B = 4, S = 4 / B = 4, S = 1",
    "steps8_08": "tuned / nodes-8 / StepsDelay(4), warm-up of 0.8 of the run / AllReduce",
    "steps8_half": "tuned / nodes-8 / StepsDelay(4), warm-up of half the run / AllReduce",
    "steps8_6th": "tuned / nodes-8 / StepsDelay(4), warm-up of a sixth / AllReduce",
    "steps32_08": "tuned / nodes-32 / StepsDelay(4), warm-up of 0.8 of the run / AllReduce",
    "gossip8": "tuned / nodes-8 / Crossover-SGD, flat / AllReduce",
    "gossip32": "tuned / nodes-32 / Crossover-SGD, flat / AllReduce",
    "gossip32_sgp": "tuned / nodes-32 / Crossover-SGD, flat / SGP, flat",
    "gossip32_one": "tuned / gossip-32 / Crossover-SGD, one fragment / Crossover-SGD, flat",
    "gossip32_ring": "tuned / gossip-32 / ring / Crossover-SGD, flat",
    "acc8_gossip": "tuned / nodes-8 / Crossover-SGD, flat",
    "acc32_gossip": "tuned / nodes-32 / Crossover-SGD, flat",
    "rate8_gossip": "tuned / nodes-8 / Crossover-SGD, flat / AllReduce / rate",
    "unequal_weights": "tuned / unequal-ranks / weights by samples / equal weights",
    "unequal_speed": "tuned / unequal-ranks / weights by speed / equal weights",
    "rare2_plain512": "tuned / rare-2 / plain averages, H = 512 / AllReduce",
    "rare2_diloco64_09": "tuned / rare-2 / DiLoCo, H = 64, outer 0.7, 0.9 / plain averages, H = 64",
    "rare2_diloco64_05": "tuned / rare-2 / DiLoCo, H = 64, outer 0.7, 0.5 / plain averages, H = 64",
    "late64_09": "tuned / late-64-0.9 / keep_local = 0.5 / keep_local = 0",
    "late64_05": "tuned / late-64-0.5 / keep_local = 0.5 / keep_local = 0",
    "muon_plain64": "across / muon-2 / rare-2 / plain averages, H = 64 / AllReduce",
    "muon_diloco64": "across / muon-2 / rare-2 / DiLoCo, H = 64, outer 0.7, 0.5 / AllReduce",
    "papers_k4_4": "papers / 000 / K' = 4; 4 nodes, learning rate 0.1 / AllReduce; 4 nodes, learning rate 0.1",
    "papers_k4_8": "papers / 000 / K' = 4; 8 nodes, learning rate 0.1 / AllReduce; 8 nodes, learning rate 0.1",
    "papers_k4_20": "papers / 000 / K' = 4; 20 nodes, learning rate 0.1 / AllReduce; 20 nodes, learning rate 0.1",
    "model_10_k5": "model / 10 / k = 5",
    "ms_compute_shared": ("speed / mlp11m-2x2-500mbit / computing, gradients averaged inside nodes over shared memory"),
    "ms_compute_alone": "speed / mlp11m-2x2-500mbit / computing alone, no communication",
    "ms_10g_ddp": "speed / mlp11m-2x2-10000mbit / Lightning DDPStrategy",
    "ms_10g_all_reduce": "speed / mlp11m-2x2-10000mbit / AllReduce",
    "ms_10g_gossip": "speed / mlp11m-2x2-10000mbit / Gossip, overlapped",
    "ms_10g_steps": "speed / mlp11m-2x2-10000mbit / StepsDelay(4)",
    "ms_10g_daso": "speed / mlp11m-2x2-10000mbit / DASO(4), merged a step later",
    "ms_10g_diloco": "speed / mlp11m-2x2-10000mbit / DiLoCo(16)",
    "ratio_torch_averager": "speed / mlp11m-2x2-500mbit / torch HierarchicalModelAverager(16) / PeriodicAveraging(16)",
    "ratio_lightning_postlocal": (
        "speed / mlp11m-2x2-500mbit / Lightning post-local SGD(16), hook registered by hand / PeriodicAveraging(16)"
    ),
    "predictions_20": "predictions / 20",
}
"""Names of numbers, and the paths of what they stand for."""

PASSAGES = {
    "speed": """\
| question | answer, measured |
|---|---|
| How long do averagers of others take, as a factor of `PeriodicAveraging(16)`? | torch's {ratio_torch_averager}, Lightning's {ratio_lightning_postlocal}; both send more |
| What does averaging inside the node cost, with nothing between nodes? | {ms_compute_shared} ms per step with it, {ms_compute_alone} ms without |
| At 10 Gbit/s, where processors are the limit, one run each? | DDP {ms_10g_ddp} ms, `AllReduce` {ms_10g_all_reduce}, `Gossip` {ms_10g_gossip}, `StepsDelay` {ms_10g_steps}, `DASO` {ms_10g_daso}, `DiLoCo` {ms_10g_diloco} |""",
    "predictions": """\
With a model of 1 M parameters on four nodes included, {predictions_20} rows are within 20 %.""",
    "periodic": """\
| the paper | here | |
|---|---|---|
| Averages every K' steps (`sync_every`) end above all-reduce, more so with more nodes | tuned, every 2 steps on 4 nodes {nodes4_periodic2}; every 4 steps on 8 nodes {nodes8_periodic4}, on 32 {nodes32_periodic4} | not seen |
| Adam and AdamW end higher too | tuned, AdamW, every 4 steps on 8 nodes {adamw8_periodic4} | not seen |
| | at the paper's learning rate of 0.1, every 4 steps: on 4 nodes {papers_k4_4}, on 8 {papers_k4_8}, on 20 {papers_k4_20} | not seen |""",
    "steps_delay": """\
| the paper | here, tuned | |
|---|---|---|
| As accurate as synchronous SGD up to k = 4 | after a warm-up of 0.8 of the run, on 4 nodes {nodes4_steps08}, on 8 {steps8_08} | seen |
| | the same on 32 nodes: {steps32_08} | not seen |
| 100 steps of warm-up are too few, 300 enough | after half of the run, on 8 nodes: {steps8_half} | not seen |
| Up to 110 % faster than MXNet's parameter server | by the cost model, against an overlapping all-reduce at 10 Gbit/s: {model_10_k5} times (k = 5) | |""",
    "daso": """\
| the paper | here | |
|---|---|---|
| A whole run reaches a similar accuracy | tuned, 8 nodes {nodes8_daso}, 32 nodes {nodes32_daso} | not seen |
| | four times longer, with its defaults: {long8_daso} | nearer |
| B up to 4 costs next to nothing | tuned, without phases: B = 2 {stale8_21_ar}, B = 4 {stale8_41_ar}, B = 8 {stale8_81_ar} | not seen |
| B = S = 1 to 8: staleness costs little | S = 4 instead of 1 at B = 4: {stale8_44} | not seen |""",
    "gossip": """\
| the paper | here, tuned | |
|---|---|---|
| Gossip allows larger learning rates than all-reduce | {rate8_gossip} of all-reduce's on 8 nodes | not seen |
| With more workers it loses, without groups | 8 nodes {gossip8}, 32 nodes {gossip32} | seen |
| SGP loses more than Crossover-SGD | Crossover-SGD against it, 32 nodes: {gossip32_sgp} | seen |
| Groups repair it | 32 replicas in 8 groups do what 8 nodes do: {acc8_gossip} % instead of {acc32_gossip} % | seen |""",
    "unequal": """\
| the paper | here | |
|---|---|---|
| Weights by speed gain 1 to 11 points over equal weights | tuned, ranks of speeds 20 : 4 : 1: {unequal_speed}; by samples {unequal_weights} | seen |""",
    "diloco": """\
| the papers | here, tuned | |
|---|---|---|
| Hundreds of steps between synchronizations cost little | plain averages against all-reduce at H = 512: {rare2_plain512} | about two points |
| The outer optimizer makes it so | momentum 0.9 against plain averages at H = 64: {rare2_diloco64_09}; momentum 0.5: {rare2_diloco64_05} | not seen in runs this short |
| Streaming: keep half of the node's own values | `keep_local=0.5` against 0, every 64 steps: {late64_09} (momentum 0.9), {late64_05} (0.5) | seen |
| MuLoCo: less is lost with Muon inside | plain averages at H = 64, Muon's loss less AdamW's: {muon_plain64}; DiLoCo with 0.5: {muon_diloco64} | seen for two of six |""",
    "scheme daso": """\
| on 8 nodes | points of accuracy |
|---|--:|
| Merging 4 steps later instead of 1, at `sync_every=4` | {stale8_44} |
| `sync_every=8` instead of 4 | {stale8_81} |
| `merge="delta"` instead of `"eq1"` | {daso8_delta} |""",
    "scheme diloco": """\
| 2 nodes, AdamW, every 64 steps of 2,000 | points of accuracy |
|---|--:|
| Outer momentum 0.9, the default, against plain averages | {rare2_diloco64_09} |
| Outer momentum 0.5 against plain averages | {rare2_diloco64_05} |
| `keep_local=0.5` against 0, outer momentum 0.9 | {late64_09} |""",
    "scheme steps_delay": """\
| warm-up, each at its best rate | points against all-reduce |
|---|--:|
| 0.8 of the run, 8 nodes | {steps8_08} |
| a sixth of the run, 8 nodes | {steps8_6th} |
| 0.8 of the run, 32 nodes | {steps32_08} |""",
    "scheme gossip": """\
| flat gossip, one replica per rank | points of accuracy |
|---|--:|
| 8 replicas, against all-reduce | {gossip8} |
| 32 replicas, against all-reduce | {gossip32} |
| 32 replicas, one fragment instead of eight | {gossip32_one} |
| 32 replicas, a ring instead of random peers | {gossip32_ring} |""",
}
"""Markdown, with names of `MEASURED` in braces."""
