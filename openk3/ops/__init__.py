"""The equations of Kimi K3: tensors in, tensors out. No modules, no config, no files."""
