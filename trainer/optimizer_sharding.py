"""ZeRO stage 1 for optimizers of whole matrices, by torch."""

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedByParameter(ZeroRedundancyOptimizer):
    """ZeRO stage 1 by whole parameters: each rank updates, and keeps the state of, its share of them.

    DeepSpeed's own stages hand an optimizer flat pieces of the weights, in which there are no rows and columns.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters on rank 0, none elsewhere. Every rank has to call it."""
        self.consolidate_state_dict(to=0)
        return super().state_dict() if self.rank == 0 else {}
