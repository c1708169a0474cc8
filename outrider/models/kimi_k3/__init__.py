"""Kimi K3 and Kimi-Linear text models."""
