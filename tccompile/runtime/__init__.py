"""Running plans: the API (`session`), the GPU engine (`gpu`) and the CPU engine (`cpu`). Imports no compiler."""
