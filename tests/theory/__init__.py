"""Tests of the theory: each formula against simulation, to within its error bar."""
