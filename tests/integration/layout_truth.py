"""Compares traced layouts with what SGLang's loader really does, in one process. Not a test; prints one line of JSON.

`python layout_truth.py <degrees> <out> <folder>...`: for each model and degree, the image that shards of several cuts are
packed into must equal, bit for bit, the parameters of a model that loaded the folder. Layouts and images (float32) are
left in <out>, for trainers to be held against.
"""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from milkweed.rollout.checks import folder_tensors
from milkweed.rollout.sglang_engine import _without_compiler
from milkweed.rollout.sglang_layout import _pretended, build
from milkweed.transfer.packing import Packing
from milkweed.transfer.plan import EngineLayout, check_complete


def cuts(tensors, how):
    """Boxes of each rank for a cut: whole, rows over three ranks (uneven), columns over two, both."""

    def box(shape, parts):
        low, size = [0] * len(shape), list(shape)
        for dim, index, count in parts:
            if dim >= len(shape):
                if index:
                    return None
                continue
            share = -(-size[dim] // count)
            start = min(index * share, size[dim])
            low[dim] += start
            size[dim] = min(share, size[dim] - start)
        return low, size

    ranks = {
        "whole": [[]], "rows3": [[(0, i, 3)] for i in range(3)], "columns2": [[(1, i, 2)] for i in range(2)],
        "columns2xrows2": [[(1, i, 2), (0, j, 2)] for i in range(2) for j in range(2)],
    }[how]  # fmt: skip
    out = []
    for parts in ranks:
        made = [(name, box(shape, parts)) for name, shape in tensors.items()]
        out.append([(name, b[0], b[1]) for name, b in made if b is not None and 0 not in b[1]])
    return out


def main() -> None:
    degrees, out, folders = [int(d) for d in sys.argv[1].split(",")], Path(sys.argv[2]), sys.argv[3:]
    found = {}
    for folder in folders:
        names = folder_tensors(folder)
        with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
            weights = {n: file.get_tensor(n) for n in names}
        heads = json.loads(Path(folder, "config.json").read_text())["num_attention_heads"]
        for degree in (d for d in degrees if heads % d == 0):  # SGLang cuts by whole heads
            for dtype in ("float32", "bfloat16"):
                layout = build(folder, degree, dtype, {})
                layout.check()
                truth = real_images(folder, degree, dtype, weights, layout)
                if dtype == "float32":
                    stem = out / f"{Path(folder).name}-{degree}"
                    stem.with_suffix(".layout").write_bytes(msgspec.msgpack.encode(layout))
                    stem.with_suffix(".image").write_bytes(truth.tobytes())
                for how in ("whole", "rows3", "columns2", "columns2xrows2"):
                    boxes = cuts(names, how)
                    check_complete(layout, boxes)
                    slot = np.zeros(layout.nbytes, np.uint8)
                    for own in boxes:
                        Packing(layout, own).place([part(weights[n], o, s) for n, o, s in own], slot)
                    key = f"{folder.rsplit('/', 1)[-1]} {degree} {dtype} {how}"
                    found[key] = bool((slot == truth).all())
    print(json.dumps(found))


def part(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].contiguous()


def real_images(folder, degree, dtype, weights, layout: EngineLayout):
    image = np.zeros(layout.nbytes, np.uint8)
    with _without_compiler(True):
        for rank in range(degree):
            with _pretended(folder, rank, degree, dtype) as (config, loader):
                with loader.set_default_torch_dtype(getattr(torch, dtype)):
                    model = loader._initialize_model(config, loader.LoadConfig())
                model.load_weights(iter(weights.items()))
            live = dict(model.named_parameters())
            for p in layout.ranks[rank].parameters:
                at = layout.starts[rank] + p.offset
                raw = live[p.name].detach().contiguous().view(-1).view(torch.uint8).numpy()
                image[at : at + p.nbytes] = raw
    return image


if __name__ == "__main__":
    main()
