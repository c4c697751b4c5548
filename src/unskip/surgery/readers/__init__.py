"""Readers of the networks that others have written, and of `residual_half`. Importing this package registers them."""

from unskip.surgery.readers import resnet, mobilenet, transformer, residual_half  # noqa: F401, I001
