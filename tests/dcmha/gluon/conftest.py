"""Skip tests that need the Gluon kernels if the installed Triton cannot compile them."""

from dcmha.impl.gluon import why_unavailable

collect_ignore = ["test_host.py", "test_operator.py", "test_resources.py"] if why_unavailable() else []
