// Runs the cases of the files that CMakeLists.txt compiles with it as one unit. All of them use the same templates, which
// take most of the time.
#include "scenes.hpp"

int main(int argc, char **argv) { return run_scenes(argc, argv); }
