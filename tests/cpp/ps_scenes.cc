// Runs the cases of kv_faults.cc and of ps_*.cc, which are compiled together with it: most of the time goes into the
// templates that all of them use.
#include "scenes.hpp"

int main(int argc, char **argv) { return run_scenes(argc, argv); }
