"""The only layer that imports hivemind and protobuf."""

import spesd.net.quiet  # noqa: F401 - hivemind reads its log level when it is imported, so before it
