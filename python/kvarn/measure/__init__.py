# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measurement: arrays of several libraries, attention problems, timing, and the tuner."""
