"""What also runs inside a sandbox or before its walls stand: standard library only, relative imports only.

This folder is mounted read-only into the sandboxes of Python programs. It holds no secret.
"""
