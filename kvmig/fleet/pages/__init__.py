"""A fleet's pages at /ui/. What pages share is in `kvmig.pages`."""
