"""What a new checkpoint amounts to, as the verbs that write one say it."""

from pathlib import Path
from typing import TYPE_CHECKING

from prelunet.evaluator.complexity import multiply_adds

if TYPE_CHECKING:
    from prelunet.training.checkpoints import Checkpoint


def sizes(checkpoint: "Checkpoint", path: Path) -> str:
    """Return the parameters and multiply-adds of a net and the bytes of its file, in one line."""
    net = checkpoint.architecture
    parameters = sum(tensor.size for tensor in checkpoint.tensors.values())
    operations = multiply_adds(net.to_json(), net.crop, net.crop, len(checkpoint.classes))
    return (
        f"{parameters:,} parameters, {operations:.4g} multiply-adds for one {net.crop}x{net.crop} crop, "
        f"{path.stat().st_size / 1e6:,.1f} MB"
    )
