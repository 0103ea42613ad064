"""Declare torchvision's operators before it is imported: its wheel is for CUDA, beside torch for CPU they are absent.

Processors of Qwen's models import torchvision for its transforms, which need none of them. A `.pth` file that says
`import torchvision_operators` does this in every process of an environment."""
import torch

NAMES = ("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
         "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward")

if not torch.version.cuda:
    library = torch.library.Library("torchvision", "DEF")
    for name in NAMES: library.define(f"{name}(Tensor x) -> Tensor")
