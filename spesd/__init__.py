"""spesd: decentralized pretraining of one Mixture-of-Experts model on volunteers' GPUs."""

__version__ = "0.1.0"
