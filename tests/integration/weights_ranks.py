"""A trainer's ranks put their weights where engines would copy them from. Not a test.

`python weights_ranks.py <place> <degrees as JSON> <folder>...`, under the environment of torch.distributed: for each model
and each `<model>-<degree>.layout` in <place>, all ranks fill one image; rank 0 writes to `ranks.json` whether it equals
`<model>-<degree>.image`, and whether the ranks hold what `predict.boxes` says.
"""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from milkweed.training.config import TrainerConfig
from milkweed.training.rank import TrainerRank
from milkweed.transfer.packing import Packing
from milkweed.transfer.plan import EngineLayout, check_complete
from milkweed.transfer.predict import Degrees, boxes


def main() -> None:
    place, degrees, folders = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    found = {}
    for folder in folders:
        rank = TrainerRank(folder, TrainerConfig(seq_len=256, **degrees), optimise=False)
        pieces = rank.hf_shards()
        own = [(p.name, tuple(p.offsets), tuple(p.tensor().shape)) for p in pieces]
        every = [None] * rank.world
        dist.all_gather_object(every, own)
        for file in sorted(place.glob(f"{Path(folder).name}-[0-9].layout")):
            layout = msgspec.msgpack.decode(file.read_bytes(), type=EngineLayout)
            check_complete(layout, every)
            filled = file.with_suffix(f".{rank.world}.filled")
            if rank.rank == 0:
                np.zeros(layout.nbytes, np.uint8).tofile(filled)
            dist.barrier()
            slot = np.memmap(filled, np.uint8, "r+")
            Packing(layout, own).place([p.tensor() for p in pieces], slot)
            slot.flush()
            dist.barrier()
            truth = np.fromfile(file.with_suffix(".image"), np.uint8)
            found[f"{file.stem} image"] = bool((np.memmap(filled, np.uint8, "r") == truth).all())
        if rank.config.data_parallel_replicate == 1:
            cut = Degrees(1, rank.config.data_parallel_shard, rank.config.tensor_parallel)
            said = boxes(layout.tensors, cut)
            # which of several that hold the same sends it is the trainer's to choose
            found[f"{Path(folder).name} boxes"] = sorted(map(str, sum(said, []))) == sorted(map(str, sum(every, [])))
        if rank.rank == 0:
            (place / "ranks.json").write_text(json.dumps(found))
        dist.barrier()



if __name__ == "__main__":
    main()
