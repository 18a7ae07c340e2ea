// Runs the cases of the program's other files.
#include "test.hpp"

int main(int argc, char **argv) { return run_cases(argc, argv); }
