"""Getting data sets and verifying them: what to download, unpack and check."""
