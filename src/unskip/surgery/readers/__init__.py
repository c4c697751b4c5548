"""Readers of the networks that others have written. Importing this package registers them."""

from unskip.surgery.readers import resnet, mobilenet, transformer  # noqa: F401, I001
