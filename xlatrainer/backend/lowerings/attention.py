"""Scaled dot-product attention, where torch hands it to the device whole."""
