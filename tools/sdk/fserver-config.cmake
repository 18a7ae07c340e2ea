# find_package(fserver): the targets
#
#   fserver::fserver   the headers and the shared library
#   fserver::archive   the headers and the archive: the program needs no file of fserver then
#
# What links with them is C++17 at least.
cmake_policy(PUSH)
cmake_policy(VERSION 3.16)

get_filename_component(_fserver "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include(CMakeFindDependencyMacro)
find_dependency(Threads)

if(NOT TARGET fserver::fserver)
  # libfserver.so has the names of the functions alone, for the linker; programs load
  # libfserver.so.@ABI@, which is beside it.
  add_library(fserver::fserver SHARED IMPORTED)
  set_target_properties(fserver::fserver PROPERTIES
    IMPORTED_LOCATION "${_fserver}/lib/libfserver.so"
    IMPORTED_SONAME "libfserver.so.@ABI@"
    INTERFACE_INCLUDE_DIRECTORIES "${_fserver}/include"
    INTERFACE_LINK_LIBRARIES Threads::Threads
    INTERFACE_COMPILE_FEATURES cxx_std_17)

  add_library(fserver::archive STATIC IMPORTED)
  set_target_properties(fserver::archive PROPERTIES
    IMPORTED_LOCATION "${_fserver}/lib/libfserver.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_fserver}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;resolv;${CMAKE_DL_LIBS}"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
unset(_fserver)
cmake_policy(POP)
