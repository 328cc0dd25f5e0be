"""Stages that take more than one room: the pipeline has them in order."""
