"""Accuracy under the sampling and under the training policy: the deployment gap."""
