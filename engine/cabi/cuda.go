package main

// The extension calls the GPU's driver through the table that this links in:
// cs_cuda.h, one for the engine and the extension.
import _ "fserver/cshim/cuda"
