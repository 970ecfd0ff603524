"""The transfer plane: weights (and KV) from process to process over NIXL.

The life of a version, and who waits for whom:

    trainer rank      Publisher.publish: cast and copy the rank's shards into the slot of its arena that no reader
                      leases, digest it chunk by chunk, lease it to the readers -> RankManifest
    controller        joins the ranks' manifests (`manifest.join`) and hands the Manifest, never the bytes, to pullers
    puller (a host)   Puller.pull: READ every rank's slot one-sided into a private buffer, verify every chunk, check
                      that the shards cover every tensor exactly once, assemble full tensors in a shared-memory slot
                      -> Staged
    controller        Publisher.release for that reader; hands Staged to the engines of that host
    engine            staging.open_staged(staged): named tensors as views; commits; keeps its hold until the next commit
    controller        Puller.release(engine, old version): the slot may be filled again

Nobody waits for a dead peer: a lease ends by release or by its time to live, every pull by its deadline. A slot that
is leased or held is never overwritten. A failed pull costs its agent and its buffer (late bytes of an abandoned READ
can then harm nothing) and leaves what was staged before untouched. All failures are `TransferError`, naming peer,
chunk or tensor.

Importing this package imports none of NIXL, torch or Monarch; `publisher` and `staging` import torch when first used.
"""
