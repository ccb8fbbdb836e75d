"""The modules of K3 and what a sequence remembers. Single-device code: no files, no distribution, no HTTP."""
