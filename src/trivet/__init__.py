"""trivet: post-train open-weight language models from raw chat data to evaluation."""

__version__ = "0.1.0"
