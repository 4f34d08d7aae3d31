"""Reference implementation of dense evaluation in torch, window by window: simple rather than fast.

Export checks its graph against it, and computes the golden scores with it in float64.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .network import PreluNet

WINDOWS_PER_BATCH = 64  # bounds memory: 64 windows of model C and their features take 60 MB in float32


def subtract_mean(images: Tensor, mean: Tensor | npt.NDArray[np.floating]) -> Tensor:
    """Subtract the mean from images, uint8 (N, H, W, 3) RGB, and move the channels first.

    mean: (3,), or a mean image (h, w, 3), which is warped to H x W (SPP-net, appendix A), bilinear with half-pixel
    centers. Mirror images before this call, not after: a mean image is not symmetric.
    Returns (N, 3, H, W) in the mean's dtype, on the images' device.
    """
    mean = torch.as_tensor(mean, device=images.device)
    if mean.ndim == 3 and mean.shape != images.shape[1:]:
        size = (int(images.shape[1]), int(images.shape[2]))
        warped = F.interpolate(mean.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False)
        mean = warped[0].permute(1, 2, 0)
    return (images.to(mean.dtype) - mean).permute(0, 3, 1, 2)


@torch.no_grad()
def dense_windows(
    net: PreluNet, image: npt.NDArray[np.uint8], mean: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """Classify every window of one image's feature map (PReLU-nets, section 4 "Testing").

    image: uint8 (H, W, 3) RGB, both sides >= the crop; mean: as in `subtract_mean`.
    Returns softmax scores and logits, each (rows, columns, K), in the net's dtype: float64 for `net.double()`.
    """
    assert not net.training, "dense evaluation without dropout: call net.eval() first"
    parameter = next(net.parameters())
    batch = torch.from_numpy(image.copy())[None].to(parameter.device)  # torch rejects the strides of mirrored views
    feature_map = net.trunk(subtract_mean(batch, torch.as_tensor(mean, dtype=parameter.dtype)))[0]
    side = net.architecture.window
    rows, columns = feature_map.shape[1] - side + 1, feature_map.shape[2] - side + 1
    assert min(rows, columns) > 0, f"an image of {image.shape[:2]} contains no window of {side}x{side} cells"
    corners = [(row, column) for row in range(rows) for column in range(columns)]
    logits = []
    for start in range(0, len(corners), WINDOWS_PER_BATCH):
        chunk = corners[start : start + WINDOWS_PER_BATCH]
        windows = torch.stack([feature_map[:, row : row + side, column : column + side] for row, column in chunk])
        logits.append(net.head(net.pyramid(windows)))
    grid = torch.cat(logits).reshape(rows, columns, -1)
    return grid.softmax(dim=2).cpu().numpy(), grid.cpu().numpy()
